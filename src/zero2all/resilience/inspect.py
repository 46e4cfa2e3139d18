"""``z2a ckpt``: what is kept of a run, and whether it is as it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zero2all.errors import UsageError, Z2aError
from zero2all.io import MANIFEST, all_files, read_json
from zero2all.paths import RemotePath
from zero2all.resilience.checkpoint import Checkpoints
from zero2all.resilience.flash import Staged, staged_in


def kept_states(checkpoints: Checkpoints, memory: Path | None) -> list[dict[str, Any]]:
    """Durable ones, then those in this machine's memory, oldest first. Only ``verify`` reads what is in them."""
    best = checkpoints.best()[:1]
    rows = []
    for step in checkpoints.steps():
        path = checkpoints.path(step)
        state = checkpoints.noted(step)
        rows.append(
            {
                "step": step,
                "where": "durable",
                "time": state.get("time"),
                "bytes": sum(_size(file) for file in all_files(path)),
                "whole": _is_finished(path),
                "notes": ["best"] * (step in best) + ["permanent"] * bool(state.get("permanent")),
            }
        )
    for step, slots in _by_step(memory).items():
        rows.append(
            {
                "step": step,
                "where": "memory",
                "time": max(slot.time for slot in slots),
                "bytes": sum(slot.data.stat().st_size for slot in slots),
                "whole": all(slot.hash is not None for slot in slots) and len(slots) == slots[0].world,
                "notes": [f"{len(slots)} of {slots[0].world} ranks"],
            }
        )
    return rows


def _is_finished(path: Path) -> bool:
    try:
        return "unfinished" not in read_json(path / MANIFEST)
    except (OSError, Z2aError):  # not there, or damaged
        return False


def problems(checkpoints: Checkpoints, memory: Path | None, step: int | None = None) -> dict[str, str]:
    """What is wrong, by the name of the checkpoint; every checksum is computed again."""
    found = {}
    for number in checkpoints.steps():
        if step in (None, number) and (problem := checkpoints.problem(number)) is not None:
            found[str(checkpoints.path(number))] = problem
    for number, slots in _by_step(memory).items():
        for slot in slots:
            # One that was not finished counts for nothing, and may be in the making.
            if slot.hash is not None and step in (None, number) and (problem := slot.problem()) is not None:
                found[str(slot.data)] = problem
    return found


def remove(checkpoints: Checkpoints, step: int, force: bool) -> None:
    """Remove a durable checkpoint, but never the last one that is whole unless forced to."""
    _must_be_there(checkpoints, step)
    others = [other for other in checkpoints.steps() if other != step]
    if not force and not any(checkpoints.is_whole(other) for other in reversed(others)):
        raise UsageError(f"step {step} is the only whole checkpoint: with --force it is removed all the same")
    checkpoints.remove(step)


def differences(checkpoints: Checkpoints, one: int, other: int) -> list[dict[str, Any]]:
    """How far each parameter lies apart in two checkpoints, the largest relative difference first."""
    _must_be_there(checkpoints, one)
    _must_be_there(checkpoints, other)
    readers = [checkpoints.reader(step) for step in (one, other)]
    known = [reader.read_metadata().state_dict_metadata for reader in readers]
    rows: list[dict[str, Any]] = []
    for name, entry in known[0].items():
        if not name.startswith("model.") or not isinstance(entry, TensorStorageMetadata):
            continue
        if name not in known[1]:
            raise UsageError(f"{name} is only in the checkpoint of step {one}: these are different models")
        parts = []
        for reader in readers:  # one parameter at a time: both models may not fit into memory
            tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
            reader.load(tensors)
            parts.append(tensors[name].double())
        largest = (parts[0] - parts[1]).abs().max().item() if parts[0].numel() else 0.0
        scale = parts[0].abs().max().item() if parts[0].numel() else 0.0
        relative = largest / scale if scale else float(largest > 0)
        rows.append({"parameter": name.removeprefix("model."), "largest": largest, "relative": relative})
    return sorted(rows, key=lambda row: (-row["relative"], row["parameter"]))


def _must_be_there(checkpoints: Checkpoints, step: int) -> None:
    if step not in (steps := checkpoints.steps()):
        there = ", ".join(map(str, steps)) or "none"
        raise UsageError(f"no checkpoint of step {step} in {checkpoints.directory}; steps there: {there}")


def _by_step(memory: Path | None) -> dict[int, list[Staged]]:
    by_step: dict[int, list[Staged]] = {}
    for slot in staged_in(memory) if memory is not None else []:
        by_step.setdefault(slot.step, []).append(slot)
    return dict(sorted(by_step.items()))


def _size(path: Path) -> int:
    return path.size() if isinstance(path, RemotePath) else path.stat().st_size
