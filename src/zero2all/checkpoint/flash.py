"""Flash checkpoints: the state of each rank in memory that outlives its process.

``<place>/z2a-<run key>-<user>/rank-3-of-8/`` in a tmpfs holds ``layout.json`` (tensor offsets), and two slots:
``slot-0.bin``, raw bytes, and ``slot-0.json``, its marker. A slot is valid once its marker has a checksum, which is
written last; the other slot is not touched before that. ``replica-5-of-8/`` is the same for states of a rank on another
node. Nothing here is a pickle.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from zero2all.checkpoint.state_dict import local_shard
from zero2all.checkpoint.training_state import (
    CheckpointCallbacks,
    Lineage,
    SavedLineage,
    TrainingState,
    contains_state,
    ignore,
)
from zero2all.console import warn
from zero2all.errors import Z2aError
from zero2all.hardware import on_current_device
from zero2all.io import fingerprint, read_record, write_json, write_text
from zero2all.torch_private import foreach_copy_
from zero2all.units import show_bytes

SHM_DIRECTORY = Path("/dev/shm")
"""The default tmpfs of in-memory checkpoints."""
KEY_FILE = "key"  # in the directory of a run
_KEY = re.compile(r"[A-Za-z0-9_]{1,64}")
ALIGNMENT = 64  # bytes
HASH_BLOCK = 1 << 20  # bytes under one hash
T = TypeVar("T")
BACKGROUND_NICENESS = 10  # relative to training
HISTORY_MARKER = "history"
ABANDONED_AFTER = 86400.0  # seconds after which the slots of a deleted run are removed


@dataclass(frozen=True)
class ShardSpec:
    """This rank's shard of a tensor: its offsets in the global tensor, and in the slot."""

    name: str
    dtype: str
    size: list[int]  # of the global tensor
    offsets: list[int]
    sizes: list[int]
    at: int
    bytes: int

    def view(self, data: Tensor) -> Tensor:
        flat = data[self.at : self.at + self.bytes].view(getattr(torch, self.dtype))
        return flat.view(self.sizes)


def slot_layout(tensors: dict[str, Tensor]) -> list[ShardSpec]:
    """The offset of each tensor in a slot. DCP's save plan gives this rank's shard of the global tensor."""
    specs, at = [], 0
    for item in create_default_local_save_plan(tensors, is_coordinator=True).items:
        assert item.tensor_data is not None
        shard = local_shard(tensors[item.index.fqn])
        chunk = item.tensor_data.chunk
        size = shard.numel() * shard.element_size()
        specs.append(
            ShardSpec(
                name=item.index.fqn,
                dtype=str(shard.dtype).removeprefix("torch."),
                size=list(item.tensor_data.size),
                offsets=list(chunk.offsets),
                sizes=list(chunk.sizes),
                at=at,
                bytes=size,
            )
        )
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return specs


@dataclass(frozen=True)
class SlotHeader:
    """The marker of a slot; one that is not finished has only step and lineage."""

    step: int
    lineage: SavedLineage
    time: float | None = None
    layout: str | None = None
    hash: str | None = None
    state: TrainingState | None = None


class Slot:
    """Memory for one state: a file in a tmpfs, or memory private to this process."""

    def __init__(self, size: int, path: Path | None) -> None:
        self.path, self.step = path, -1
        self.header: SlotHeader | None = None
        """Of the state that it holds, once committed in a file by this process."""
        self._lineage: Lineage = ()
        self.commit_future: Future[None] | None = None
        self.reader_future: Future[None] | None = None  # a durable write that reads it
        size = padded_bytes(size)
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            self.step = _step_in_marker(self.marker)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(descriptor, size)
                if hasattr(os, "posix_fallocate"):  # fails here if memory is full, not by a SIGBUS later
                    os.posix_fallocate(descriptor, 0, size)
                # Pages are allocated before the first state is staged.
                self._map = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
            finally:
                os.close(descriptor)
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def marker(self) -> Path:
        assert self.path is not None
        return self.path.with_suffix(".json")

    def begin(self, step: int, lineage: Lineage) -> None:
        """Invalidate the slot."""
        self.step, self._lineage, self.header = step, lineage, None
        if self.path is not None:
            self.marker.unlink(missing_ok=True)
            self._mark(SlotHeader(step, lineage))

    def finish(self, layout: str, state: TrainingState) -> None:
        """Commit the slot: write its checksum."""
        if self.path is not None:
            checksum = slot_checksum(self.data)
            self._commit(SlotHeader(self.step, self._lineage, time.time(), layout, checksum, state))

    def adopt(self, header: SlotHeader) -> str | None:
        """Commit data that was received with this marker; returns why not, if it does not match."""
        if slot_checksum(self.data) != header.hash:
            self.discard()
            return "it does not match its checksum"
        return None if self._commit(header) else "it cannot be kept in memory"

    def discard(self) -> None:
        """Never restored: it is overwritten before the other slot, which may be."""
        self.step = -1

    def _commit(self, header: SlotHeader) -> bool:
        if not self._mark(header):
            self.discard()
            return False
        self.header = header
        return True

    def _mark(self, header: SlotHeader) -> bool:
        partial = self.marker.with_suffix(".partial")
        fields = {name: value for name, value in asdict(header).items() if value is not None}
        try:
            partial.write_text(json.dumps(fields), encoding="utf-8")
            partial.replace(self.marker)
        except OSError as error:  # another process filled the tmpfs: training continues
            warn(f"the state of step {self.step} cannot be kept in memory: {error}", every_rank=True)
            return False
        return True


def padded_bytes(size: int) -> int:
    """Of a slot's file: full blocks are hashed."""
    return -(-max(1, size) // HASH_BLOCK) * HASH_BLOCK


def _step_in_marker(marker: Path) -> int:
    """The step of the valid state that a slot holds from an earlier process; -1 if there is none."""
    try:
        header = read_record(SlotHeader, marker)
    except (OSError, Z2aError):
        return -1
    return header.step if header.hash is not None else -1


def slot_checksum(data: Tensor) -> str:
    """SHA-256 over the hashes of full blocks: finds any flipped bit, and reordered blocks, at memory bandwidth."""
    words = data.view(torch.int64).view(-1, HASH_BLOCK // 8)
    return hashlib.sha256(torch.hash_tensor(words, dim=1).numpy().tobytes()).hexdigest()


class Slots:
    """The slots of this rank: two in a directory, or one in private memory without a directory.

    >>> slots = Slots(tensors, directory / "rank-0-of-1")
    >>> slot = slots.stage(20, lineage, tensors, state, record.flush)  # returns after one copy
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        directory: Path | None,
        callbacks: CheckpointCallbacks | None = None,
        after_commit: Callable[[Slot], None] = ignore,
    ) -> None:
        """``after_commit`` is called in the background with each slot that is valid."""
        self._callbacks, self._after_commit = callbacks or CheckpointCallbacks(), after_commit
        self.shard_specs = slot_layout(tensors)
        self._layout = layout_fingerprint(self.shard_specs)
        size = slot_bytes(self.shard_specs)
        if directory is None:
            self.slots = [Slot(size, None)]
        else:
            _prepare_slot_directory(directory, self.shard_specs)
            self.slots = [Slot(size, directory / f"slot-{number}.bin") for number in range(2)]
        if any(tensor.is_cuda for tensor in tensors.values()):
            for slot in self.slots:
                pin_slot_memory(slot.data)
        self._views = [[spec.view(slot.data) for spec in self.shard_specs] for slot in self.slots]

    def stage(
        self,
        step: int,
        lineage: Lineage,
        tensors: dict[str, Tensor],
        state: TrainingState,
        before_commit: Callable[[], bool],
    ) -> Slot:
        """Copy the state; the checksum and the marker follow in the background, if ``before_commit`` returns True."""
        slot = self._slot_to_overwrite()
        slot.begin(step, lineage)
        self._callbacks.on_phase("staging")
        views = self._views[self.slots.index(slot)]
        foreach_copy_(views, [local_shard(tensors[spec.name]) for spec in self.shard_specs])

        def finish() -> None:
            if before_commit():
                self._callbacks.on_phase("marker")
                slot.finish(self._layout, state)
                self._after_commit(slot)
            else:
                warn(f"the state of step {step} is not kept in memory: the run record has not caught up with it")
                slot.discard()

        slot.commit_future = run_in_background(finish)
        return slot

    def views(self, slot: Slot) -> dict[str, Tensor]:
        """The tensors of a slot, without a copy."""
        return {
            spec.name: view for spec, view in zip(self.shard_specs, self._views[self.slots.index(slot)], strict=True)
        }

    def wait(self) -> None:
        """Wait until every staged state has its marker."""
        for slot in self.slots:
            if slot.commit_future is not None:
                slot.commit_future.result()

    def _slot_to_overwrite(self) -> Slot:
        """The slot to overwrite: the one with the older state, unless it is being read."""
        self.wait()  # until the newer one is valid, the older one is the only state
        free = [slot for slot in self.slots if slot.reader_future is None or slot.reader_future.done()]
        if not free:
            assert self.slots[0].reader_future is not None
            self.slots[0].reader_future.exception()
            free = self.slots
        return min(free, key=lambda slot: slot.step)


def pin_slot_memory(data: Tensor) -> None:
    """Pin memory: copies from the device become several times as fast. Without it they still work."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(data.data_ptr(), data.numel(), 0))
    if code != 0:
        clear_cuda_error()
        warn(
            f"{show_bytes(data.numel())} for states in memory cannot be pinned (CUDA error {code}): checkpoints stall "
            "training for longer; see 'ulimit -l'"
        )


def clear_cuda_error() -> None:
    """A failed call stays CUDA's last error, which the next kernel would report: consume it here."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def run_in_background(function: Callable[[], T], niceness: int = BACKGROUND_NICENESS) -> Future[T]:
    """On a daemon thread: one that waits for a lost rank must not keep the process alive. ``niceness`` is relative to
    the main thread: 0 for work that training soon waits for."""
    outcome: Future[T] = Future()

    def run() -> None:
        if sys.platform == "linux":  # per-thread priority: training goes first
            # That of the main thread: one that a background thread starts has inherited a lower one.
            priority = os.getpriority(os.PRIO_PROCESS, os.getpid()) + niceness
            with suppress(PermissionError):  # only root may raise one that was inherited
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, priority))
        try:
            result = function()
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=on_current_device(run), name="z2a-keep", daemon=True).start()
    return outcome


def slot_bytes(specs: list[ShardSpec]) -> int:
    return max((spec.at + spec.bytes for spec in specs), default=0)


def layout_fingerprint(specs: list[ShardSpec]) -> str:
    """Which shards of the weights a rank holds. Optimizer state is sharded as the weights are, but created later."""
    return fingerprint([asdict(spec) for spec in specs if spec.name.startswith("model.")])


def _prepare_slot_directory(directory: Path, specs: list[ShardSpec]) -> None:
    """Keep the slots of an earlier process with the same layout until they are overwritten."""
    layout = directory / "layout.json"
    try:
        same = read_record(list[ShardSpec], layout) == specs
    except (OSError, Z2aError):
        same = False
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not same:
        for old in directory.glob("slot-*"):
            old.unlink(missing_ok=True)
        write_json(layout, [asdict(spec) for spec in specs])


def register_rank_directory(directory: Path, history: str) -> None:
    """Mark ``directory`` as used by a rank of this history."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_text(directory / HISTORY_MARKER, history)


def rank_directory(directory: Path, rank: int, world_size: int, replica: bool = False) -> Path:
    """Where the slots of a rank are: its own, or replicas on another node."""
    return directory / f"{'replica' if replica else 'rank'}-{rank}-of-{world_size}"


def _rank_directories(directory: Path) -> list[Path]:
    return sorted(path for kind in ("rank", "replica") for path in directory.glob(f"{kind}-*-of-*"))


def remove_stale_ranks(directory: Path, history: str) -> None:
    """Remove the slots of ranks no longer on this machine, and replicas that it is no longer to keep. All current
    ones must be registered."""
    for found in _rank_directories(directory):
        try:
            stale = (found / HISTORY_MARKER).read_text(encoding="utf-8") != history
        except OSError:
            stale = True
        if stale:
            shutil.rmtree(found, ignore_errors=True)


def map_slot(path: Path) -> Tensor:
    """The bytes of a slot; what is written to them does not reach the file."""
    with open(path, "rb") as stream:
        return torch.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


@dataclass(frozen=True)
class StagedSlot:
    """A slot as its marker describes it, readable by any process."""

    data: Path
    rank: int
    world_size: int
    header: SlotHeader
    replica: bool = False
    """Of a rank that was on another node."""

    def problem(self) -> str | None:
        """Why it is not valid; None if it is."""
        if self.header.hash is None:
            return "was not finished"
        try:
            data = map_slot(self.data)
        except (OSError, ValueError):
            return "cannot be read"
        if len(data) % HASH_BLOCK == 0 and slot_checksum(data) == self.header.hash:
            return None
        return "does not match its checksum"

    def shard_specs(self) -> list[ShardSpec]:
        return read_record(list[ShardSpec], self.data.with_name("layout.json"))


def find_staged_slots(directory: Path) -> list[StagedSlot]:
    """All slots below a run's directory that have a marker."""
    slots = []
    for path in [path for parent in _rank_directories(directory) for path in sorted(parent.glob("slot-*.json"))]:
        try:
            kind, rank, _, world_size = path.parent.name.split("-")
            header = read_record(SlotHeader, path)
            slots.append(StagedSlot(path.with_suffix(".bin"), int(rank), int(world_size), header, kind == "replica"))
        except (OSError, ValueError, Z2aError):
            continue  # being written or removed at this moment
    return slots


def drop_abandoned_slots(directory: Path, lineage: Lineage) -> None:
    """Invalidate states that ``lineage`` does not contain."""
    for slot in find_staged_slots(directory):
        if not contains_state(lineage, slot.header.step, slot.header.lineage[-1].history):
            slot.data.with_suffix(".json").unlink(missing_ok=True)


def flash_directory(parent: Path, key: str) -> Path:
    """The directory of a run; other users cannot guess its name."""
    return parent / f"z2a-{key}-{os.getuid()}"


def privacy_problem(directory: Path) -> str | None:
    """Why other users may have written to a directory; None if only this user can, or if it does not exist."""
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(status.st_mode):
        return f"{directory} is not a directory"
    if status.st_uid != os.getuid():
        return f"{directory} belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{directory} can be written by other users"
    return None


def claim_flash_directory(directory: Path, run: Path) -> None:
    """Create the directory of a run, and remove those of deleted runs."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (reason := privacy_problem(directory)) is not None:
        raise PermissionError(reason)
    write_text(directory / "run", f"{run.absolute()}\n")
    for other in _abandoned_directories(directory.parent):
        shutil.rmtree(other, ignore_errors=True)


def _abandoned_directories(parent: Path) -> Iterator[Path]:
    for directory in parent.glob(f"z2a-*-{os.getuid()}"):
        if privacy_problem(directory) is not None:  # planted: what is in it may never end
            continue
        try:
            run = Path((directory / "run").read_text(encoding="utf-8").rstrip("\n"))
            newest = max(path.stat().st_mtime for path in directory.rglob("*"))
        except (OSError, ValueError):
            continue
        if not _belongs_to_run(run, directory) and time.time() - newest > ABANDONED_AFTER:
            yield directory


def _belongs_to_run(run: Path, directory: Path) -> bool:
    """Whether a run owns these states: another run may have replaced it, with its own key."""
    key = read_key(run)
    return key is not None and flash_directory(directory.parent, key) == directory


def read_key(run: Path) -> str | None:
    """The key in the directory of a run; None if it has none, or none that we write: it becomes part of a path."""
    try:
        with open(run / KEY_FILE, encoding="utf-8") as stream:
            key = stream.read(100).strip()
    except (OSError, UnicodeDecodeError):  # only the owner of the run may read it
        return None
    return key if _KEY.fullmatch(key) else None
