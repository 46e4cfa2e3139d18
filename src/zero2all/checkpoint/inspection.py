"""Checkpoints of a run that is not loaded: ``z2a ckpt`` lists, verifies, removes and compares them, and other programs
read their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import MANIFEST, read_json
from zero2all.base.manifest import all_files
from zero2all.base.paths import RemotePath
from zero2all.base.records import first_problem
from zero2all.checkpoint.checkpoint_directory import STATE_FILE, checkpoint_step
from zero2all.checkpoint.checkpoint_store import CheckpointStore
from zero2all.checkpoint.dcp_reader import read_metadata
from zero2all.checkpoint.integrity import IntegrityResult, read_checksums, verify_sizes
from zero2all.checkpoint.restore import StorageTier
from zero2all.checkpoint.staged_slot import StagedSlot, find_staged_slots
from zero2all.recipe import ModelConfig


@dataclass(frozen=True)
class CheckpointListing:
    step: int
    where: StorageTier
    time: float | None
    bytes: int
    whole: bool
    notes: list[str]


@dataclass(frozen=True)
class ParameterDifference:
    parameter: str
    largest: float
    """Absolute difference of one value."""
    relative: float
    """The largest difference divided by the largest absolute value of the parameter."""


def list_checkpoints(checkpoints: CheckpointStore, flash_directory: Path | None) -> list[CheckpointListing]:
    """Durable checkpoints, then states in this machine's memory, oldest first. Their data is not read."""
    best = checkpoints.best_steps()[:1]
    rows = []
    for step in checkpoints.steps():
        path = checkpoints.path(step)
        header = checkpoints.header_or_empty(step)
        rows.append(
            CheckpointListing(
                step=step,
                where="durable",
                time=header.time,
                bytes=sum(_size(file) for file in all_files(path)),
                whole=_is_finished(path),
                notes=["best"] * (step in best) + ["permanent"] * header.permanent,
            )
        )
    for step, slots in _by_step(flash_directory).items():
        rows.append(
            CheckpointListing(
                step=step,
                where="memory",
                time=max(slot.header.time or 0.0 for slot in slots),
                bytes=sum(slot.data.stat().st_size for slot in slots),
                whole=all(slot.header.hash is not None for slot in slots) and _num_ranks(slots) == slots[0].world_size,
                notes=_slot_notes(slots),
            )
        )
    return rows


def _num_ranks(slots: list[StagedSlot]) -> int:
    return len({slot.rank for slot in slots})


def _slot_notes(slots: list[StagedSlot]) -> list[str]:
    replicas = sorted(slot.rank for slot in slots if slot.replica)
    notes = [f"{_num_ranks(slots)} of {slots[0].world_size} ranks"]
    return [*notes, f"replicas of ranks {', '.join(map(str, replicas))}"] if replicas else notes


def _is_finished(path: Path) -> bool:
    try:
        return "unfinished" not in read_json(path / MANIFEST)
    except (OSError, Z2aError):  # missing or damaged
        return False


def find_problems(
    checkpoints: CheckpointStore, flash_directory: Path | None, step: int | None = None
) -> dict[str, str]:
    """Problems by checkpoint; every checksum is recomputed, and the pickle of DCP may contain nothing but its types."""
    problems = {}
    for number in checkpoints.steps():
        if step not in (None, number):
            continue
        problem = checkpoints.problem(number) or _metadata_problem(checkpoints.path(number))
        if problem is not None:
            problems[str(checkpoints.path(number))] = problem
    for number, slots in _by_step(flash_directory).items():
        for slot in slots:
            # An unfinished slot is not used, and may be being written.
            if slot.header.hash is not None and step in (None, number) and (problem := slot.problem()) is not None:
                problems[str(slot.data)] = problem
    return problems


def _metadata_problem(path: Path) -> str | None:
    """A checksum proves nothing about a checkpoint from elsewhere: its author wrote the checksums, too."""
    try:
        read_metadata(path / ".metadata")
    except (Z2aError, OSError) as error:
        return str(error)
    return None


def remove_checkpoint(checkpoints: CheckpointStore, step: int, *, force: bool) -> None:
    """Remove a durable checkpoint, but not the only valid one unless forced."""
    _require_step(checkpoints, step)
    others = [other for other in checkpoints.steps() if other != step]
    if not force and not any(checkpoints.is_valid(other) for other in reversed(others)):
        raise UsageError(f"step {step} is the only valid checkpoint: remove it with --force")
    checkpoints.remove(step)


def compare_checkpoints(checkpoints: CheckpointStore, one: int, other: int) -> list[ParameterDifference]:
    """The difference of each parameter between two checkpoints, the largest relative one first."""
    _require_step(checkpoints, one)
    _require_step(checkpoints, other)
    readers = [checkpoints.reader(step) for step in (one, other)]
    known = [reader.entries() for reader in readers]
    rows = []
    for name, entry in known[0].items():
        if not name.startswith("model."):
            continue
        if name not in known[1]:
            raise UsageError(f"{name} is only in the checkpoint of step {one}: these are different models")
        values = []
        for reader in readers:  # one parameter at a time: both models may not fit into memory
            tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
            reader.load(tensors)
            values.append(tensors[name].double())
        largest = (values[0] - values[1]).abs().max().item() if values[0].numel() else 0.0
        scale = values[0].abs().max().item() if values[0].numel() else 0.0
        relative = largest / scale if scale else float(largest > 0)
        rows.append(ParameterDifference(name.removeprefix("model."), largest, relative))
    return sorted(rows, key=lambda row: (-row.relative, row.parameter))


def _require_step(checkpoints: CheckpointStore, step: int) -> None:
    if step not in (steps := checkpoints.steps()):
        available = ", ".join(map(str, steps)) or "none"
        raise UsageError(f"no checkpoint of step {step} in {checkpoints.directory}; steps there: {available}")


def _by_step(flash_directory: Path | None) -> dict[int, list[StagedSlot]]:
    by_step: dict[int, list[StagedSlot]] = {}
    for slot in find_staged_slots(flash_directory) if flash_directory is not None else []:
        by_step.setdefault(slot.header.step, []).append(slot)
    return dict(sorted(by_step.items()))


def _size(path: Path) -> int:
    return path.size() if isinstance(path, RemotePath) else path.stat().st_size


PREFIX = "model."


class CheckpointWeights:
    """The weights of a checkpoint of a run, on disk or in an object store.

    >>> weights = CheckpointWeights(Path("runs/first/run/checkpoints/step-00000400"))
    """

    def __init__(self, path: Path) -> None:
        step = checkpoint_step(path.name)
        if step is None:
            raise UsageError(f"{path} is not a checkpoint: its name is not such as step-00000400")
        self.path, self.step, store = path, step, CheckpointStore(path.parent)
        self._raise_if_damaged(verify_sizes(path, step))
        state = store.read_state(step)
        self.tokenizer_fingerprint = state.tokenizer
        try:
            self.config = ModelConfig.model_validate({**state.model, **asdict(state.rope)})
        except ValidationError as error:
            raise self._damaged(f"{STATE_FILE}: {first_problem(error)}") from error
        self._reader = store.reader(step)
        self._entries = {
            name.removeprefix(PREFIX): entry
            for name, entry in self._reader.entries().items()
            if name.startswith(PREFIX)
        }
        dtypes = {str(entry.properties.dtype).removeprefix("torch.") for entry in self._entries.values()}
        self.dtype = ", ".join(sorted(dtypes))

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._entries[name].size) if name in self._entries else None

    def read(self, name: str, begin: Sequence[int], size: Sequence[int]) -> Tensor:
        return self._reader.read_part(f"{PREFIX}{name}", begin, size)

    def checksums(self, rank: int, world_size: int) -> dict[str, str]:
        self._raise_if_damaged(CheckpointStore(self.path.parent).verify(self.step, (rank, world_size)))
        return read_checksums(self.path, self.step, (rank, world_size))

    def _raise_if_damaged(self, result: IntegrityResult) -> None:
        if result.kind != "valid":
            raise self._damaged(result.reason)

    def _damaged(self, reason: str) -> Z2aError:
        return Z2aError(f"{self.path} cannot be used: {reason}; give another checkpoint of the run")
