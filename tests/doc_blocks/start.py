"""Pages of docs/start, docs/learn and docs/contribute."""

from __future__ import annotations

from tests.doc_pages import Page, Sandbox, prepare_text

SMALL_MODEL = "{{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, qk_norm: true}}"


def prepare_nothing(page: Sandbox) -> None:
    """The commands need no text and no run."""


PAGES = [
    Page("docs/index.md", prepare_nothing, {
        "--chat --out runs/first": "--chat --out runs/first train.steps=330",
        "z2a chat runs/first/chat": "echo 'Tell me a story.' | z2a chat runs/first/chat",
    }),
    Page("docs/start/install.md", prepare_nothing, in_clone=True, own_venv=True),
    Page("docs/start/first-model.md", prepare_nothing, {
        "--out runs/first": "--out runs/first train.steps=330",
        "z2a chat runs/first/chat": "echo 'Tell me a story.' | z2a chat runs/first/chat",
    }),
    Page("docs/start/your-text.md", prepare_text, {
        "--out runs/quick": "--out runs/quick train.steps=20", "vocab_size: 8192": "vocab_size: 512",
        "{preset: z2all-10m}": SMALL_MODEL, "tokens: 5M": "tokens: 20Ki", "seq_len: 512": "seq_len: 64",
        "batch_tokens: 16Ki": "batch_tokens: 1Ki", "micro_batch_tokens: 4Ki": "micro_batch_tokens: 256",
        "100 steps": "10 steps",
        "--nproc-per-node 8 --nnodes 4": "--nproc-per-node 1 --nnodes 2", "--nproc-per-node 8": "--nproc-per-node 2",
        "head:29500": "127.0.0.1:{port}",
    }, recipe="mine.yaml"),
    Page("docs/start/how-large.md", prepare_nothing),
]  # fmt: skip
NOT_RUN = {"docs/learn/first-hour.md": "tests/test_tutorial.py runs it on a pseudo-terminal"}
