"""Train the runs whose records the tests of the health checks read: healthy ones of every recipe for a CPU, and faults.

    nice python -m tests.track.make_records WORK      # about 20 minutes of one core; finished runs in WORK are kept

Models and batches are smaller than those of the recipes, text, order and noise are real. ``tests/track/records`` gets
what the health checks read: losses, a few other metrics, events, and the metadata of the run.
"""

from __future__ import annotations

import gzip
import json
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml

from zero2all.base.console import say
from zero2all.base.errors import Z2aError
from zero2all.base.machine.devices import PeakFlops
from zero2all.corpus import build_corpus
from zero2all.parallel import ParallelModel
from zero2all.recipe import Recipe, builtin_recipe_path, load_recipe
from zero2all.storyworld import LANGUAGES, generate_stories
from zero2all.storyworld.conversations import generate_conversations
from zero2all.tokenizer import train_tokenizer
from zero2all.tokens import build_tokens
from zero2all.train import setup, step, train
from zero2all.train.data_loader import Batch
from zero2all.train.job import TrainerHooks

RECORDS = Path(__file__).parent / "records"
STORIES = 2500  # of each language
CONVERSATIONS = 1500
FAULT_STEP = 80
FAULT_STEPS = 125  # of a run with a fault
SEEDS = (1, 2, 3, 4, 5)
METRICS = ("loss", "grad_norm", "tokens_per_second", "reward", "truncated_answers", "groups_without_spread",
           "sampler_gap", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")  # fmt: skip
EVENTS = ("start", "resume", "stage", "not finite", "spike", "done")
SMALL = ("model.hidden_size=64", "model.intermediate_size=128", "model.num_attention_heads=2",
         "model.num_key_value_heads=2")  # fmt: skip


@dataclass(frozen=True)
class RunToMake:
    """A run of a built-in recipe, changed by ``overrides``."""

    name: str
    recipe: str
    overrides: tuple[str, ...]
    seed: int
    fault: str | None = None


class Faults:
    """What goes wrong from ``FAULT_STEP`` on, as hooks of the trainer."""

    def __init__(self, fault: str | None) -> None:
        self.fault, self.step, self._batch = fault, 0, None
        self._batch: Batch | None

    def hooks(self) -> TrainerHooks:
        return TrainerHooks(on_batch=self._on_batch, on_gradients=self._on_gradients)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The learning rate has no hook."""
        real = step.set_learning_rate

        def set_learning_rate(optimizers: Any, recipe: Any, multiplier: float) -> None:
            real(optimizers, recipe, multiplier * (30 if self.fault == "lr" and self.step >= FAULT_STEP else 1))

        peak = PeakFlops(1e15, "not measured, which takes longer than many steps")
        with (
            patch.object(step, "set_learning_rate", set_learning_rate),
            patch.object(setup, "peak_flops", lambda device, dtype: peak),
        ):
            yield

    def _on_batch(self, batch: Batch) -> None:
        self.step = batch.step
        if batch.step < FAULT_STEP:
            return
        if self.fault == "shuffled":
            order = torch.randperm(batch.targets.shape[1], generator=torch.Generator().manual_seed(batch.step))
            batch.targets.copy_(batch.targets[:, order])
        if self.fault == "repeated":
            self._batch = self._batch or batch
            _copy_rows(self._batch, batch, list(range(len(batch.sources))), list(range(len(batch.sources))))
        if self.fault == "dead":
            alive = [row for row, source in enumerate(batch.sources) if source != "zh"]
            if alive:
                self._batch = batch
            dead = [row for row, source in enumerate(batch.sources) if source == "zh"]
            source_rows = alive or [row for row, source in enumerate(self._batch.sources) if source != "zh"]
            _copy_rows(self._batch, batch, [source_rows[n % len(source_rows)] for n in range(len(dead))], dead)

    def _on_gradients(self, model: ParallelModel) -> None:
        if self.fault == "nan" and self.step == FAULT_STEP:
            for weight in model.model.parameters():
                if weight.grad is not None:
                    weight.grad[0] = float("nan")


def _copy_rows(source: Batch, target: Batch, rows: list[int], into: list[int]) -> None:
    for row, place in zip(rows, into, strict=True):
        target.inputs[place], target.targets[place] = source.inputs[row].clone(), source.targets[row].clone()
        target.sources[place] = source.sources[row]
        if target.on_device is not None and target.on_device.doc_starts is not None:
            target.on_device.doc_starts[place] = source.on_device.doc_starts[row].clone()


def similar(prompt: str, answer: str, reference: str) -> float:
    """A reward: the share of the words of the reference that the answer has."""
    words = set(reference.split())
    return len(words & set(answer.split())) / max(1, len(words))


def runs_to_make() -> list[RunToMake]:
    """Healthy ones first; those that start from another run after it."""
    rows_of_256 = ("train.seq_len=256", "train.batch_tokens=512")  # two rows in a batch, as in the recipe
    stories = (*SMALL, *rows_of_256, "train.steps=300")
    runs = [RunToMake(f"stories-{seed}", "stories", stories, seed) for seed in SEEDS]
    shorter = (*SMALL, *rows_of_256, "train.steps=160")
    runs += [RunToMake(f"stories-short-{seed}", "stories", shorter, seed) for seed in (6, 7, 8)]
    own_text = (*SMALL, "train.steps=300", "train.batch_tokens=512", "train.optimizer={name: adamw, lr: 4e-3}")
    runs += [RunToMake(f"quickstart-{seed}", "quickstart", own_text, seed) for seed in SEEDS[:2]]
    muon = (*SMALL, "train.steps=250", "train.batch_tokens=512")
    runs.append(RunToMake("quickstart-muon-1", "quickstart", muon, 1))
    staged = (*SMALL, "model.num_hidden_layers=2", "train.batch_tokens=512", "train.seq_len=128",
              "train.optimizer={name: adamw, lr: 3e-3}")  # fmt: skip
    runs.append(RunToMake("reference-1", "reference/reference", staged, 1))
    curriculum = (
        "train.stages=[{name: all, steps: 150, schedule: {shape: constant, warmup: 20 steps}}, "
        "{name: without-code, steps: 100, mixture: {zh: 1, en: 1}, schedule: {shape: linear, warmup: 0}}]",
    )
    runs.append(RunToMake("curriculum", "reference/reference", (*staged, *curriculum), 1))
    short = ("train.seq_len=256", "train.batch_tokens=1024", "train.micro_batch_tokens=1024", "train.epochs=1")
    for seed in SEEDS[:2]:
        runs.append(RunToMake(f"chat-{seed}", "chat", short, seed))
        runs.append(RunToMake(f"lora-{seed}", "lora", short, seed))
    preferences = (*short, "train.batch_tokens=2048")
    runs += [RunToMake(f"{recipe}-1", recipe, preferences, 1) for recipe in ("dpo", "kto")]
    grpo = ("train.steps=60", "train.seq_len=256", "train.batch_tokens=1024", "train.micro_batch_tokens=2048",
            "train.objective.grpo.rewards=['tests.track.make_records:similar']",
            "train.objective.grpo.group_size=4", "train.objective.max_answer_tokens=100")  # fmt: skip
    runs.append(RunToMake("grpo-1", "grpo", grpo, 1))
    distill = (*short[:3], "train.tokens=null", "train.steps=250", "train.schedule.warmup=20 steps")
    runs.append(RunToMake("distill-1", "distill", distill, 1))
    runs.append(RunToMake("sft-1", "sft", short, 1))
    runs.append(RunToMake("stories-long-rows", "stories", (*SMALL, "train.steps=200"), 1))
    for fault in ("lr", "nan", "dead", "repeated", "shuffled"):
        faulty = (*SMALL, *rows_of_256, f"train.steps={FAULT_STEPS}")
        runs += [RunToMake(f"{fault}-{seed}", "stories", faulty, seed, fault) for seed in SEEDS]
    return runs


def write_text_files(work: Path) -> None:
    """Stories, conversations, preferences and ratings in both languages; code of Python's standard library."""
    if (work / "ready").exists():
        return
    for language in LANGUAGES:
        _write_lines(work / f"{language}.jsonl", ({"text": text} for text in generate_stories(language, 7, STORIES)))
        found = list(generate_conversations(language, 7, CONVERSATIONS))
        found = [one for one in found if len(one.prompt[-1]["content"]) < 400]
        _write_lines(work / f"chat-{language}.jsonl", ({"messages": one.messages} for one in found))
        pairs = list(zip(found, found[1:] + found[:1], strict=True))
        _write_lines(work / f"pairs-{language}.jsonl", (
            {"prompt": one.prompt, "chosen": one.messages[-1:], "rejected": other.messages[-1:]}
            for one, other in pairs if one.reference != other.reference))  # fmt: skip
        _write_lines(work / f"ratings-{language}.jsonl", (
            {"prompt": one.prompt, "completion": (other, one)[number % 2].messages[-1:], "label": bool(number % 2)}
            for number, (one, other) in enumerate(pairs)))  # fmt: skip
    library = Path(sysconfig.get_paths()["stdlib"])
    _write_lines(work / "code.jsonl", (
        {"text": path.read_text(encoding="utf-8", errors="replace")}
        for name in ("json", "email", "asyncio", "http", "logging", "xml", "unittest")
        for path in sorted((library / name).rglob("*.py"))))  # fmt: skip
    (work / "ready").touch()


def _write_lines(path: Path, records: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records), encoding="utf-8")


def prepare(run: RunToMake, work: Path) -> Recipe:
    """The recipe with its text; its tokens are built, once for all runs that read the same."""
    kind, file = {"chat": ("chat", "chat-"), "sft": ("chat", "chat-"), "lora": ("chat", "chat-"),
                  "grpo": ("chat", "chat-"), "dpo": ("preference", "pairs-"),
                  "kto": ("rating", "ratings-")}.get(run.recipe, ("text", ""))  # fmt: skip
    names = [*LANGUAGES, "code"] if run.recipe in ("quickstart", "reference/reference") else list(LANGUAGES)
    sources = [{"name": name, "kind": kind, "paths": [f"{work}/{file}{name}.jsonl"]} for name in names]
    base = f"{work}/runs/stories-1/run"
    starts = run.recipe in ("chat", "sft", "lora", "dpo", "kto", "grpo", "distill")
    tokenizer = "stories" if starts else run.recipe.replace("/", "-")
    places = [f"out={work}/runs/{run.name}", f"seed={run.seed}", f"corpus.sources={json.dumps(sources)}",
              f"tokenizer.dir={work}/tokenizer-{tokenizer}", "tokenizer.vocab_size=1536", "train.device=cpu",
              f"corpus.dir={work}/documents-{run.recipe.replace('/', '-')}",
              f"tokens.dir={work}/tokens-{run.recipe.replace('/', '-')}", "track.log_every=50"]  # fmt: skip
    if starts:
        # Alignment starts from the fine-tuned model, as its recipes do.
        init = f"{work}/runs/chat-1/run" if run.recipe in ("dpo", "kto", "grpo") else base
        places += [f"train.objective.distill.teacher={base}" if run.recipe == "distill" else f"train.init={init}"]
        model = yaml.safe_load((work / "runs/stories-1/run/recipe.yaml").read_text())["model"]
        lora = {"lora": {"rank": 8, "alpha": 16}} if run.recipe == "lora" else {}
        places += [f"model={json.dumps({**model, **lora})}"]
    recipe = load_recipe(builtin_recipe_path(f"{run.recipe}.yaml"), [*run.overrides, *places])
    build_corpus(recipe.corpus, recipe.documents_dir)
    if not starts:
        train_tokenizer(recipe.tokenizer, recipe.documents_dir, recipe.tokenizer_dir)
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)
    return recipe


def make_run(run: RunToMake, work: Path) -> None:
    recipe = prepare(run, work)
    faults = Faults(run.fault)
    with faults.installed(), suppress(Z2aError) if run.fault == "nan" else _no_context():
        train(recipe, faults.hooks())


@contextmanager
def _no_context() -> Iterator[None]:
    yield


def stripped_record(run: RunToMake, directory: Path) -> dict[str, Any]:
    """What the health checks read of a run; times start at 0."""
    recipe = yaml.safe_load((directory / "recipe.yaml").read_text())
    model = json.loads((directory / "identity.json").read_text())["model"]
    lines = [json.loads(line) for line in (directory / "record.jsonl").read_text().splitlines()]
    kept, begun = [], lines[0]["time"]
    for line in lines:
        if ("event" in line and line["event"] not in EVENTS) or "sample" in line or "histogram" in line:
            continue
        names = list(line) if "event" in line else ["step", *(n for n in line if n in METRICS or n.startswith("loss/"))]
        one = {name: _rounded(line[name]) for name in names if name not in ("documents", "time")}
        if len(one) > 1:
            kept.append({**one, "time": round(line["time"] - begun, 2)})
    train_keys = {
        key: recipe["train"][key] for key in ("batch_tokens", "objective", "stages") if key in recipe["train"]
    }
    sources = [{"name": one["name"]} for one in recipe["corpus"]["sources"]]
    stored = {"name": recipe["name"], "corpus": {"sources": sources}, "train": train_keys}
    return {"run": run.name, "fault": run.fault, "recipe": stored, "vocab_size": model["vocab_size"], "lines": kept}


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def pack(runs: list[RunToMake], work: Path) -> None:
    """One compressed file of healthy runs and one of faulty ones, a run in each line."""
    RECORDS.mkdir(exist_ok=True)
    is_healthy: Callable[[RunToMake], bool] = lambda run: run.fault is None  # noqa: E731
    for name, wanted in (("healthy", is_healthy), ("faulty", lambda run: not is_healthy(run))):
        lines = [json.dumps(stripped_record(run, work / "runs" / run.name / "run")) + "\n"
                 for run in runs if wanted(run) and (work / "runs" / run.name / "finished").exists()]  # fmt: skip
        (RECORDS / f"{name}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode(), mtime=0))


def main(work: Path, kind: str = "") -> None:
    """``kind``: only runs with this fault, healthy ones, or the run of this name."""
    work.mkdir(parents=True, exist_ok=True)
    write_text_files(work)
    runs = runs_to_make()
    for run in runs if not kind else [run for run in runs if kind in (run.fault or "healthy", run.name)]:
        finished = work / "runs" / run.name / "finished"
        if not finished.exists():
            begun = time.process_time()
            make_run(run, work)
            finished.touch()
            say(f"MADE {run.name} in {time.process_time() - begun:.0f} s of CPU time")
    pack(runs, work)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), *sys.argv[2:])
