"""Helpers for tests of interrupted runs."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero2all.checkpoint import (
    CheckpointCallbacks,
    CheckpointedModel,
    CheckpointManager,
    CheckpointPlaces,
    CheckpointStore,
    RankGroup,
    ReplicaOptions,
    TrainingState,
)
from zero2all.checkpoint.restore_point import RestorePoint
from zero2all.checkpoint.staged_slot import find_staged_slots
from zero2all.checkpoint.training_state import GuardState, RopeState
from zero2all.recipe import Recipe
from zero2all.track import read_steps
from zero2all.train import Run, TrainerHooks, train
from zero2all.train.data_loader import Batch

TRAINING_STATE = TrainingState(
    stages=[], tokenizer="", model={}, optimizer="adamw", rope=RopeState(1e4, None), guard=GuardState(-1, [], [])
)


def tiny_manager(
    root: Path,
    memory: Path | None = None,
    rank_group: RankGroup | None = None,
    storage: CheckpointStore | None = None,
    replicas: ReplicaOptions | None = None,
    **callbacks: Any,
) -> CheckpointManager:
    """Of one layer. ``memory``: where states in memory are. ``callbacks`` are fields of ``CheckpointCallbacks``."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    places = CheckpointPlaces(storage or CheckpointStore(root / "checkpoints"), root, memory, replicas)
    trained = CheckpointedModel(model, [optimizer])
    return CheckpointManager(places, trained, rank_group or RankGroup(), CheckpointCallbacks(**callbacks))


def weight_of(manager: CheckpointManager) -> torch.Tensor:
    """The weight of the model of ``tiny_manager``."""
    return manager.trained.model.weight.data


def save(manager: CheckpointManager, *steps: int, durable: bool = False) -> None:
    """One after the other, each to its end."""
    for step in steps:
        manager.save(step, TRAINING_STATE, durable=durable)
        manager.wait_until_saved()


def resume(manager: CheckpointManager) -> RestorePoint | None:
    """Load what is found, or begin a history."""
    if (found := manager.find_restore_point()) is None:
        manager.begin_history(None)
    else:
        manager.load(found)
    return found


def committed_steps(memory: Path) -> set[int]:
    return {slot.header.step for slot in find_staged_slots(memory) if slot.header.hash is not None}


def failing(
    function: Callable[..., Any], step: int, name: str | None = None, times: int = 10**9, code: int = errno.EIO
) -> Callable[..., Any]:
    """``function``, but for files of a checkpoint, or the one of this name, it fails ``times`` times."""
    left = [times]

    def fail(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.parent.name == f"step-{step:08}" and name in (None, path.name) and left[0] > 0:
            left[0] -= 1
            raise OSError(code, os.strerror(code), str(path))
        return function(path, *args, **kwargs)

    return fail


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


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
