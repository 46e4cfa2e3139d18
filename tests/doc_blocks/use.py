"""Pages about post-training, evaluation and use: how their blocks run."""

from __future__ import annotations

import json
import shutil
from typing import Any

import yaml

from tests.doc_pages import (
    Page,
    Sandbox,
    prepare_benchmarks,
    prepare_pretrained,
    prepare_probes,
    prepare_run,
    prepare_stages,
    prepare_text,
    tiny_recipe,
)
from tests.evals.bench.fakes import write_benchmarks

CONTEXT = 256  # of the base model: a row takes both conversations of a pair
SMALL_BASE = (
    "{{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, "
    f"num_key_value_heads: 2, max_position_embeddings: {CONTEXT}}}}}"
)
SIZES = {
    "{preset: z2all-25m, qk_norm: true}": SMALL_BASE,
    "{preset: z2all-25m}": SMALL_BASE,
    "seq_len: 1024": "seq_len: 256",
    "seq_len: 512": "seq_len: 256",
    "batch_tokens: 131072": "batch_tokens: 1Ki",
    "batch_tokens: 32768": "batch_tokens: 1Ki",
    "batch_tokens: 8192": "batch_tokens: 512",
    "tokens: 500M": "tokens: 4Ki",
    "every: 50 steps": "every: 2 steps",
}


def sizes(*printed: str) -> dict[str, str]:
    """The changes of a page that prints these sizes."""
    return {name: SIZES[name] for name in printed}


def prepare_base(page: Sandbox) -> None:
    """A small base model as ``runs/base``, ``runs/sft`` and ``runs/dpo``, and data for every objective."""
    prepare_stages(page)
    recipe = tiny_recipe(page)
    recipe["model"]["max_position_embeddings"] = CONTEXT
    (page.work / "my.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    page.z2a("train", "my.yaml")
    (page.work / "runs" / "base").symlink_to("mine")
    write_examples(page)


def write_examples(page: Sandbox) -> None:
    """Sums, as conversations, pairs and ratings."""
    lines: dict[str, list[Any]] = {"sft": [], "questions": [], "pairs": [], "ratings": []}
    for one in range(12, 92, 2):
        for other in range(3, 33, 5):
            question, right = f"What is {one} plus {other}?", f"The sum is {one + other}"
            asked = {"role": "user", "content": question}
            lines["sft"].append({"messages": [asked, {"role": "assistant", "content": right}]})
            lines["pairs"].append({"prompt": question, "chosen": right, "rejected": f"The sum is {one - other}"})
            lines["ratings"].append({"prompt": question, "completion": right, "label": other % 2 == 0})
    lines["questions"] = lines["sft"]
    for name, records in lines.items():
        directory = page.work / "data" / name
        directory.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(record) + "\n" for record in records)
        (directory / "part-0.jsonl").write_text(text, encoding="utf-8")
    (page.work / "seeds.jsonl").write_text(json.dumps(lines["sft"][0]) + "\n", encoding="utf-8")


def prepare_teacher(page: Sandbox) -> None:
    """The base model is the teacher; text for the student."""
    prepare_text(page)
    prepare_base(page)
    shutil.copytree(page.work / "data" / "books", page.work / "data" / "text")


def prepare_tuned(page: Sandbox) -> None:
    """The same with a model to start from as ``runs/sft``."""
    prepare_base(page)
    (page.work / "runs" / "sft").symlink_to("mine")


def prepare_rewards(page: Sandbox) -> None:
    """The same, where Python finds a module of the page in every command, also in the check of its recipe."""
    prepare_tuned(page)
    page.environment["PYTHONPATH"] = f"{page.work}:{page.environment['PYTHONPATH']}"


def prepare_sft(page: Sandbox) -> None:
    """The recipe ``sft.yaml`` with its corpus and tokens, before training."""
    prepare_base(page)
    recipe = small_recipe("sft", tiny_recipe(page)["model"])
    (page.work / "sft.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    for stage in ("corpus", "tokens"):
        page.z2a(stage, "build", "sft.yaml")


def small_recipe(name: str, model: dict[str, Any]) -> dict[str, Any]:
    """A recipe of post-training as the repository has it, in the size of a test."""
    objective: dict[str, Any] = {"name": name}
    kinds = {"sft": ("chat", "sft", "runs/base"), "dpo": ("preference", "pairs", "runs/sft")}
    kind, data, init = kinds[name]
    return {
        "name": name,
        "out": f"runs/{name}",
        "corpus": {"sources": [{"name": "data", "paths": [f"data/{data}"], "kind": kind}], "holdout": 0.05},
        "tokenizer": {"dir": "runs/base/tokenizer"},
        "model": {**model, "max_position_embeddings": CONTEXT},
        "train": {
            "init": init, "objective": objective, "steps": 3, "seq_len": CONTEXT, "batch_tokens": 1024,
            "precision": "fp32", "optimizer": {"lr": 1e-4},
        },
    }  # fmt: skip


def prepare_walk(page: Sandbox) -> None:
    """The recipes of the walk in the size of a test, their data, and benchmarks."""
    prepare_base(page)
    (page.work / "eval").mkdir()
    write_benchmarks(page.work / "eval")
    for name in ("sft", "dpo"):
        recipe = small_recipe(name, tiny_recipe(page)["model"])
        (page.work / "recipes" / f"{name}.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")


def prepare_prompts(page: Sandbox) -> None:
    prepare_run(page)
    (page.work / "prompts.txt").write_text("Once upon a time\n从前\n", encoding="utf-8")


LORA = {"train.optimizer.lr=1e-3": "train.optimizer.lr=1e-3 train.steps=2"}
PAGES = [
    Page(
        "docs/how-to/post-train/index.md", prepare_walk,
        {"z2a quickstart --chat --out runs/first": "z2a quickstart --out runs/first train.steps=20",
         "z2a chat runs/first/chat": "z2a chat runs/base"},
        in_clone=True,
    ),
    Page(
        "docs/how-to/post-train/sft.md", prepare_base,
        {**sizes("{preset: z2all-25m, qk_norm: true}", "seq_len: 1024", "batch_tokens: 32768", "every: 50 steps"),
         "--endpoint http://127.0.0.1:8000/v1 --model NAME --count 500": "--help"},
        recipe="sft.yaml",
    ),
    Page("docs/how-to/post-train/lora.md", prepare_sft, LORA),
    Page(
        "docs/how-to/post-train/preferences.md", prepare_tuned,
        sizes("{preset: z2all-25m, qk_norm: true}", "seq_len: 1024", "batch_tokens: 32768", "every: 50 steps"),
        recipe="dpo.yaml",
    ),
    Page(
        "docs/how-to/post-train/kto.md", prepare_tuned,
        sizes("{preset: z2all-25m, qk_norm: true}", "seq_len: 1024", "batch_tokens: 32768", "every: 50 steps"),
        recipe="kto.yaml",
    ),
    Page(
        "docs/how-to/post-train/grpo.md", prepare_rewards,
        {**sizes("{preset: z2all-25m, qk_norm: true}", "seq_len: 512", "batch_tokens: 8192", "every: 50 steps"),
         "max_answer_tokens: 64": "max_answer_tokens: 8", "steps: 100": "steps: 2",
         "PYTHONPATH=. ": ""},
        recipe="grpo.yaml",
    ),
    Page(
        "docs/how-to/post-train/distill.md", prepare_teacher,
        sizes("{preset: z2all-25m}", "seq_len: 1024", "batch_tokens: 131072", "tokens: 500M", "every: 50 steps"),
        recipe="distill.yaml",
    ),
    Page(
        "docs/how-to/evaluate/loss.md", prepare_pretrained,
        {"--step 400": "--step 12", "step-00000400": "step-00000012", "--nproc-per-node 4": "--nproc-per-node 2"},
    ),
    Page("docs/how-to/evaluate/benchmarks.md", prepare_benchmarks, in_clone=True),
    Page("docs/how-to/evaluate/memorized.md", prepare_benchmarks),
    Page("docs/how-to/evaluate/code.md", prepare_benchmarks, in_clone=True),
    Page(
        "docs/how-to/evaluate/probes.md", prepare_probes,
        {"--out runs/first checkpoint": "--out runs/again train.steps=20 checkpoint"},
    ),
    Page(
        "docs/how-to/use/generate.md", prepare_prompts,
        {"runs/first": "runs/mine", "runs/big": "runs/mine", '"Once upon a time"] * 200': '"Once upon a time"] * 4'},
    ),
    Page(
        "docs/how-to/use/chat.md", prepare_run,
        {"z2a quickstart --out runs/first --chat": "z2a quickstart --out runs/quick train.steps=20",
         "runs/first/chat": "runs/mine"},
    ),
    Page("docs/how-to/use/export.md", prepare_run, {"--step 400": "--step 8"}, in_clone=True),
    Page("docs/how-to/use/gguf.md", prepare_run, in_clone=True),
]  # fmt: skip
NOT_RUN = {"docs/how-to/use/serve.md": "a server runs until Ctrl-C; tests/generation/serve calls its API"}
