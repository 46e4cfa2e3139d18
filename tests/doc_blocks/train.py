"""Pages about training, the model and extensions: how their blocks run."""

from __future__ import annotations

from tests.doc_pages import Page, prepare_pretrained, prepare_run, prepare_stages, prepare_text

SMALL_MODEL = "{{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, qk_norm: true}}"
NOT_RUN: dict[str, str] = {}
PAGES = [
    Page(
        "docs/how-to/train/run.md", prepare_text,
        {"vocab_size: 16384": "vocab_size: 512", "{preset: z2all-25m}": SMALL_MODEL, "tokens: 500M": "tokens: 20Ki",
         "seq_len: 1024": "seq_len: 64", "200 steps": "50 steps"},
    ),
    Page("docs/how-to/train/learning-rate.md", prepare_stages, {"--budget 1000-steps": "--budget 4-steps"}),
    Page("docs/how-to/train/mup.md", prepare_stages, {"train.steps=1000": "train.steps=12"}),
    Page("docs/how-to/train/schedules.md", prepare_stages, {"200 steps": "2 steps"}),
    Page("docs/how-to/train/optimizers.md", prepare_stages),
    Page("docs/how-to/train/precision-and-speed.md", prepare_stages),
    Page("docs/how-to/train/validation.md", prepare_stages, {"every=100 steps": "every=4 steps"}),
    Page(
        "docs/how-to/train/several-runs.md", prepare_stages,
        {"num_hidden_layers=12": "num_hidden_layers=1", "num_hidden_layers=24": "num_hidden_layers=1",
         "--nproc-per-node 8": "--nproc-per-node 2", "vocab_size=32768": "vocab_size=480"},
    ),
    Page(
        "docs/how-to/train/resume.md", prepare_run,
        {"train.tokens=2B": "train.tokens=4Ki", "--nproc-per-node 4": "--nproc-per-node 2",
         "my.yaml train.optimizer.lr": "my.yaml train.tokens=5Ki train.optimizer.lr", "runs/mine 5000": "runs/mine 20",
         "train my.yaml checkpoint": "train runs/mine/run checkpoint"},
    ),
    Page(
        "docs/how-to/train/continue-pretraining.md", prepare_pretrained,
        {"hidden_size: 1024": "hidden_size: 32", "intermediate_size: 3072": "intermediate_size: 64",
         "num_hidden_layers: 28": "num_hidden_layers: 2", "num_attention_heads: 16": "num_attention_heads: 4",
         "num_key_value_heads: 8": "num_key_value_heads: 2", "head_dim: 128": "head_dim: 8",
         "max_position_embeddings: 40960": "max_position_embeddings: 64", "vocab_size: 151936": "vocab_size: 512",
         "rope_theta: 1000000.0": "rope_theta: 10000.0", "rms_norm_eps: 1.0e-06": "rms_norm_eps: 1.0e-05",
         "tokens: 2B": "tokens: 1Ki", "seq_len: 4096": "seq_len: 32", "batch_tokens: 512Ki": "batch_tokens: 256",
         "micro_batch_tokens: 8Ki": "micro_batch_tokens: 128", "warmup: 100 steps": "warmup: 1 steps",
         "step-00000400": "step-00000012"},
        recipe="medicine.yaml",
    ),
    Page(
        "docs/how-to/train/overnight.md", prepare_text,
        {"vocab_size: 32768": "vocab_size: 512", "{preset: z2all-85m, qk_norm: true}": SMALL_MODEL,
         "tokens: 1B": "tokens: 20Ki", "seq_len: 1024": "seq_len: 64", "batch_tokens: 256Ki": "batch_tokens: 1Ki",
         "micro_batch_tokens: 16Ki": "micro_batch_tokens: 256", "compile: true": "compile: false",
         "200 steps": "2 steps", "500 steps": "10 steps"},
        recipe="overnight.yaml", in_clone=True,
    ),
    Page("docs/how-to/train/compare.md", prepare_run, {"--budget 5m": "--budget 4-steps"}),
    Page(
        "docs/how-to/train/mixture.md", prepare_run,
        {"--budget 2M-tokens": "--budget 60-steps", "--mixtures 12": "--mixtures 8"},
    ),
    Page(
        "docs/how-to/train/python-api.md", prepare_run,
        {"runs/first/recipe.yaml": "runs/mine/run/recipe.yaml", "train.steps=700": "train.tokens=4Ki",
         "train.steps=800": "train.tokens=5Ki"},
    ),
    Page("docs/explain/training-step.md", prepare_stages),
    Page("docs/how-to/model/configure.md", prepare_stages),
    Page("docs/how-to/model/mixture-of-experts.md", prepare_stages),
    Page("docs/how-to/extend/plugins.md", prepare_stages, in_clone=True),
    Page("docs/how-to/extend/plugins-training.md", prepare_stages, in_clone=True),
    Page("docs/how-to/extend/model-options.md", prepare_stages, in_clone=True),
]  # fmt: skip
