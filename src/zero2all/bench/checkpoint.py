"""``z2a bench checkpoint``: what a checkpoint stalls, and how fast it is written and loaded."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

from zero2all.base.console import progress
from zero2all.base.errors import Z2aError
from zero2all.bench.measurements import Measurement, MeasurementReport, this_machine
from zero2all.checkpoint import (
    SHM_DIRECTORY,
    CheckpointCallbacks,
    CheckpointedModel,
    CheckpointManager,
    CheckpointPlaces,
    CheckpointStore,
    RankGroup,
    TrainingState,
)
from zero2all.checkpoint.state_dict import flatten_tensors, training_state_dict
from zero2all.checkpoint.training_state import GuardState, RopeState
from zero2all.model import Z2all
from zero2all.optim.optimizer import build_optimizers
from zero2all.recipe import Recipe


def bench_checkpoint(recipe: Recipe, directory: Path, rounds: int = 5) -> MeasurementReport:
    """Save and load the state of the recipe's model with its optimizer, in and under ``directory``."""
    torch.manual_seed(recipe.seed)
    model = Z2all(recipe.model).init_weights(recipe.seed)
    optimizers = build_optimizers(model, recipe.train.optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    state = training_state_dict(model, optimizers)
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in flatten_tensors(state))
    stalls: list[float] = []
    writes: list[float] = []
    loads: dict[str, list[float]] = {"memory": [], "disk": []}
    directory.mkdir(parents=True, exist_ok=True)
    memory_root = SHM_DIRECTORY if Path(SHM_DIRECTORY).is_dir() else None
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="bench-checkpoint-") as disk,
        tempfile.TemporaryDirectory(dir=memory_root, prefix="z2a-bench-") as memory,
        progress("checkpoints", rounds + 1) as advance,
    ):
        place, ranks = Path(disk), RankGroup()
        callbacks = CheckpointCallbacks(on_saved=lambda step, seconds: writes.append(seconds))
        store, trained = CheckpointStore(place), CheckpointedModel(model, optimizers)
        manager = CheckpointManager(CheckpointPlaces(store, place, Path(memory) / "flash"), trained, ranks, callbacks)
        from_disk = CheckpointManager(CheckpointPlaces(store, place), trained, ranks)
        try:
            for step in range(1, rounds + 2):  # the first creates the slots in memory
                stalls.append(manager.save(step, blank_training_state(), durable=True))
                manager.wait_until_saved()
                loads["memory"].append(_time_load(manager))
                loads["disk"].append(_time_load(from_disk))
                advance(1)
        finally:
            manager.close("finished")
            from_disk.close("finished")
    mb = size / 1e6
    rows = [
        Measurement("stall of training", 1e3 * statistics.median(stalls[1:]), "ms", "copy to memory"),
        Measurement("write in the background", mb / statistics.median(writes[1:]), "MB/s", f"to {directory}"),
        Measurement("load from memory", mb / statistics.median(loads["memory"][1:]), "MB/s"),
        Measurement(
            "load from disk", mb / statistics.median(loads["disk"][1:]), "MB/s", "from the page cache, if it fits"
        ),
    ]
    title = f"state of {mb:,.0f} MB ({recipe.train.optimizer.name}), medians of {rounds} checkpoints"
    return MeasurementReport("checkpoint", title, this_machine(), rows)


def _time_load(manager: CheckpointManager) -> float:
    """Seconds to find, check and load the newest state."""
    begin = time.perf_counter()
    found = manager.find_restore_point()
    if found is None:
        raise Z2aError("the checkpoint that was just written is not valid: is the disk faulty?")
    manager.load(found)
    return time.perf_counter() - begin


def blank_training_state() -> TrainingState:
    """The state of no run, for a checkpoint whose tensors are all that is measured."""
    rope, guard = RopeState(10_000.0, None), GuardState(stage=0, loss=[], norm=[])
    return TrainingState(stages=[], tokenizer="", model={}, optimizer="", rope=rope, guard=guard)
