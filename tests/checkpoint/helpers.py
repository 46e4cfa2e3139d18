"""Helpers for tests of interrupted runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from zero2all.checkpoint import TrainingState
from zero2all.checkpoint.training_state import GuardState, RopeState
from zero2all.recipe import Recipe
from zero2all.track import read_steps
from zero2all.train import Run, TrainerHooks, train
from zero2all.train.data_loader import PADDING_SOURCE, Batch

TRAINING_STATE = TrainingState(
    stages=[], tokenizer="", model={}, optimizer="adamw", rope=RopeState(1e4, None), guard=GuardState(-1, [], [])
)


class CrashError(Exception):
    pass


def crash_at(when: int) -> Callable[[Batch], None]:
    def crash(batch: Batch) -> None:
        if batch.step == when:
            raise CrashError

    return crash


def crashed(recipe: Recipe, when: int) -> None:
    """Train until the batch of step ``when`` comes."""
    try:
        train(recipe, hooks=TrainerHooks(on_batch=crash_at(when)))
    except CrashError:
        return
    raise AssertionError("the run finished")


def losses(run: Run | Path) -> dict[int, str]:
    """The recorded losses, digit for digit."""
    path = run.record_path if isinstance(run, Run) else run / "run" / "record.jsonl"
    return {step: repr(values["loss"]) for step, values in read_steps(path).items() if "loss" in values}


def rows_read(seen: dict[int, list[str]]) -> Callable[[Batch], None]:
    """Records a hash of every row that this rank reads, by step; a repeated step replaces the first."""

    def record(batch: Batch) -> None:
        real = [row for row, source in zip(batch.inputs, batch.sources, strict=True) if source != PADDING_SOURCE]
        seen[batch.step] = [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in real]

    return record
