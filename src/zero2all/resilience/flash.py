"""Flash checkpoints: the state of each rank in memory that outlives its process.

``<place>/z2a-<run key>-<user>/rank-3-of-8/`` in a tmpfs holds ``layout.json`` (which tensor lies where), and two slots:
``slot-0.bin``, raw bytes, and ``slot-0.json``, its marker. A slot counts once its marker has a checksum, which is
written last; the other slot is not touched before that. Nothing here is a pickle.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
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
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from zero2all.console import warn
from zero2all.errors import Z2aError
from zero2all.io import fingerprint, read_json, write_json, write_text
from zero2all.resilience.lineage import Lineage, from_json, passes_through, to_json
from zero2all.resilience.state import local
from zero2all.units import show_bytes

PLACE = Path("/dev/shm")
ALIGN = 64  # bytes
BLOCK = 1 << 20  # bytes under one hash
NICER = 10  # than training
OCCUPANT = "history"
OLD = 86400.0  # seconds after which what a vanished run left behind is removed


@dataclass(frozen=True)
class Piece:
    """This rank's part of a tensor: where it lies in the whole tensor, and in the slot."""

    name: str
    dtype: str
    size: list[int]  # of the whole tensor
    offsets: list[int]
    sizes: list[int]
    at: int
    bytes: int

    def view(self, data: Tensor) -> Tensor:
        flat = data[self.at : self.at + self.bytes].view(getattr(torch, self.dtype))
        return flat.view(self.sizes)


def cut(tensors: dict[str, Tensor]) -> list[Piece]:
    """Where each tensor goes in a slot. DCP says which part of the whole this rank holds."""
    pieces, at = [], 0
    for item in create_default_local_save_plan(tensors, is_coordinator=True).items:
        assert item.tensor_data is not None
        part = local(tensors[item.index.fqn])
        chunk = item.tensor_data.chunk
        size = part.numel() * part.element_size()
        pieces.append(
            Piece(
                name=item.index.fqn,
                dtype=str(part.dtype).removeprefix("torch."),
                size=list(item.tensor_data.size),
                offsets=list(chunk.offsets),
                sizes=list(chunk.sizes),
                at=at,
                bytes=size,
            )
        )
        at += -(-size // ALIGN) * ALIGN
    return pieces


class Slot:
    """Room for one state: a file in a tmpfs, or memory of this process alone."""

    def __init__(self, size: int, path: Path | None) -> None:
        self.path, self.step = path, -1
        self._lineage: Lineage = ()
        self.commit: Future[None] | None = None
        self.reader: Future[None] | None = None  # a persist that reads it
        size = -(-max(1, size) // BLOCK) * BLOCK
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            self.step = _marked_step(self.marker)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(descriptor, size)
                if hasattr(os, "posix_fallocate"):  # no room is told here, not by a SIGBUS later
                    os.posix_fallocate(descriptor, 0, size)
                # Pages are there before the first state comes.
                self._map = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
            finally:
                os.close(descriptor)
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def marker(self) -> Path:
        assert self.path is not None
        return self.path.with_suffix(".json")

    def begin(self, step: int, lineage: Lineage) -> None:
        """From here on the slot counts for nothing."""
        self.step, self._lineage = step, lineage
        if self.path is not None:
            self.marker.unlink(missing_ok=True)
            self._mark({})

    def finish(self, layout: str, state: dict[str, Any]) -> None:
        """From here on it counts."""
        if self.path is not None:
            found = {"time": time.time(), "layout": layout, "hash": digest(self.data), "state": state}
            if not self._mark(found):
                self.discard()

    def discard(self) -> None:
        """What it holds is not used after a restart: it is overwritten before the other, which may be."""
        self.step = -1

    def _mark(self, found: dict[str, Any]) -> bool:
        partial = self.marker.with_suffix(".partial")
        marker = {"step": self.step, "lineage": to_json(self._lineage), **found}
        try:
            partial.write_text(json.dumps(marker), encoding="utf-8")
            partial.replace(self.marker)
        except OSError as error:  # somebody filled the place up: training goes on
            warn(f"the state of step {self.step} cannot be kept in memory: {error}", every_rank=True)
            return False
        return True


def _marked_step(marker: Path) -> int:
    """Of the state that a slot still holds from an earlier process; -1 if it holds none that counts."""
    try:
        kept = json.loads(marker.read_text(encoding="utf-8"))
        return int(kept["step"]) if "hash" in kept else -1
    except (OSError, ValueError, KeyError):
        return -1


def digest(data: Tensor) -> str:
    """Of whole blocks. A hash of words in each, which finds any flipped bit at the speed of memory, and their order."""
    words = data.view(torch.int64).view(-1, BLOCK // 8)
    return hashlib.sha256(torch.hash_tensor(words, dim=1).numpy().tobytes()).hexdigest()


class Slots:
    """The slots of this rank: two in a directory, or one in the process's own memory without one.

    >>> slots = Slots(tensors, directory / "rank-0-of-1")
    >>> slot = slots.stage(20, lineage, tensors, {"step": 20}, record.flush)  # returns after one copy
    """

    def __init__(self, tensors: dict[str, Tensor], directory: Path | None) -> None:
        self.pieces = cut(tensors)
        self._layout = layout_of(self.pieces)
        size = size_of(self.pieces)
        if directory is None:
            self.slots = [Slot(size, None)]
        else:
            _make_room(directory, self.pieces)
            self.slots = [Slot(size, directory / f"slot-{number}.bin") for number in range(2)]
        if any(tensor.is_cuda for tensor in tensors.values()):
            for slot in self.slots:
                pin(slot.data)
        self._views = [[piece.view(slot.data) for piece in self.pieces] for slot in self.slots]

    def stage(
        self,
        step: int,
        lineage: Lineage,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        before_commit: Callable[[], bool],
    ) -> Slot:
        """Copy the state; the checksum and the marker follow in the background, if ``before_commit`` agrees."""
        slot = self._free()
        slot.begin(step, lineage)
        views = self._views[self.slots.index(slot)]
        torch._foreach_copy_(views, [local(tensors[piece.name]) for piece in self.pieces])

        def finish() -> None:
            if before_commit():
                slot.finish(self._layout, state)
            else:
                warn(f"the state of step {step} is not kept in memory: the run record has not caught up with it")
                slot.discard()

        slot.commit = in_background(finish)
        return slot

    def views(self, slot: Slot) -> dict[str, Tensor]:
        """What a slot holds, without a copy."""
        return {piece.name: view for piece, view in zip(self.pieces, self._views[self.slots.index(slot)], strict=True)}

    def wait(self) -> None:
        """Until every state that was staged has its marker."""
        for slot in self.slots:
            if slot.commit is not None:
                slot.commit.result()

    def _free(self) -> Slot:
        """The slot to overwrite: the one with the older state, unless it is being read."""
        self.wait()  # until the newer one counts, the older one is all there is
        free = [slot for slot in self.slots if slot.reader is None or slot.reader.done()]
        if not free:
            assert self.slots[0].reader is not None
            self.slots[0].reader.exception()
            free = self.slots
        return min(free, key=lambda slot: slot.step)


def pin(data: Tensor) -> None:
    """Lock memory in place: copies from the device to it are several times as fast. Without it they still work."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(data.data_ptr(), data.numel(), 0))
    if code != 0:
        clear_cuda_error()
        warn(
            f"{show_bytes(data.numel())} for states in memory cannot be pinned (CUDA error {code}): checkpoints stall "
            "training for longer; see 'ulimit -l'"
        )


def clear_cuda_error() -> None:
    """A failed call stays CUDA's last error, which the next kernel would be blamed for: let one report it here."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def in_background(function: Callable[[], None]) -> Future[None]:
    """On a thread that ends with the process: one that waits for a lost rank must not keep this one alive."""
    outcome: Future[None] = Future()
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.cuda.current_device() if on_gpu else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)  # a new thread works on the first one
        if sys.platform == "linux":  # where a thread has a priority of its own: training goes first
            me = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, me, min(19, os.getpriority(os.PRIO_PROCESS, me) + NICER))
        try:
            function()
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    threading.Thread(target=run, name="z2a-keep", daemon=True).start()
    return outcome


def size_of(pieces: list[Piece]) -> int:
    return max((piece.at + piece.bytes for piece in pieces), default=0)


def layout_of(pieces: list[Piece]) -> str:
    """Which part of the weights a rank holds. Optimizer state is cut as the weights are, but comes into being later."""
    return fingerprint([asdict(piece) for piece in pieces if piece.name.startswith("model.")])


def _make_room(directory: Path, pieces: list[Piece]) -> None:
    """Keep what an earlier process of the same layout left, until it is overwritten."""
    layout = [asdict(piece) for piece in pieces]
    try:
        same = read_json(directory / "layout.json") == layout
    except (OSError, Z2aError):
        same = False
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not same:
        for old in directory.glob("slot-*"):
            old.unlink(missing_ok=True)
        write_json(directory / "layout.json", layout)


def occupy(directory: Path, history: str) -> None:
    """Say that a rank of this history keeps its states in ``directory``."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_text(directory / OCCUPANT, history)


def remove_stale(directory: Path, history: str) -> None:
    """Remove what ranks left that are not on this machine now. All that are must have said so before."""
    for place in directory.glob("rank-*-of-*"):
        try:
            stale = (place / OCCUPANT).read_text(encoding="utf-8") != history
        except OSError:
            stale = True
        if stale:
            shutil.rmtree(place, ignore_errors=True)


@dataclass(frozen=True)
class Staged:
    """A slot as a marker describes it, seen from any process."""

    data: Path
    rank: int
    world: int
    step: int
    lineage: Lineage | None
    """None if it was written before histories were kept."""
    time: float
    layout: str
    hash: str | None
    state: dict[str, Any]

    def problem(self) -> str | None:
        """Why it does not count; nothing if it does."""
        if self.hash is None:
            return "was not finished"
        try:
            with open(self.data, "rb") as stream:
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            if len(mapped) % BLOCK == 0 and digest(torch.frombuffer(mapped, dtype=torch.uint8)) == self.hash:
                return None
        except (OSError, ValueError):
            return "cannot be read"
        return "does not match its checksum"

    def pieces(self) -> list[Piece]:
        return [Piece(**piece) for piece in read_json(self.data.with_name("layout.json"))]


def staged_in(directory: Path) -> list[Staged]:
    """All slots below a run's directory that have ever begun to hold a state."""
    found = []
    for path in sorted(directory.glob("rank-*-of-*/slot-*.json")):
        try:
            marker = json.loads(path.read_text(encoding="utf-8"))
            _, rank, _, world = path.parent.name.split("-")
            data = path.with_suffix(".bin")
            lineage = from_json(marker["lineage"]) if "lineage" in marker else None
            # Only the marker of a finished slot has all of it.
            finished = marker.get("time", 0.0), marker.get("layout", ""), marker.get("hash"), marker.get("state", {})
            found.append(Staged(data, int(rank), int(world), marker["step"], lineage, *finished))
        except (OSError, ValueError, KeyError, Z2aError):
            continue  # being written or removed at this moment
    return found


def forget_abandoned(directory: Path, lineage: Lineage) -> None:
    """States that ``lineage`` does not pass through count no more."""
    for slot in staged_in(directory):
        if slot.lineage is None or not passes_through(lineage, slot.step, slot.lineage[-1].history):
            slot.data.with_suffix(".json").unlink(missing_ok=True)


def flash_directory(place: Path, key: str) -> Path:
    """The directory of a run; its name cannot be guessed by others, and it is only ours."""
    return place / f"z2a-{key}-{os.getuid()}"


def why_not_private(directory: Path) -> str | None:
    """Why others may have written what is in a directory; nothing if only this user can, or if there is none."""
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(found.st_mode):
        return f"{directory} is not a directory"
    if found.st_uid != os.getuid():
        return f"{directory} belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{directory} can be written by other users"
    return None


def claim(directory: Path, run: Path) -> None:
    """Make the directory of a run, and remove those of runs that are long gone."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (reason := why_not_private(directory)) is not None:
        raise PermissionError(reason)
    write_text(directory / "run", f"{run.absolute()}\n")
    for other in _abandoned(directory.parent):
        shutil.rmtree(other, ignore_errors=True)


def _abandoned(place: Path) -> Iterator[Path]:
    for directory in place.glob(f"z2a-*-{os.getuid()}"):
        try:
            run = Path((directory / "run").read_text(encoding="utf-8").rstrip("\n"))
            newest = max(path.stat().st_mtime for path in directory.rglob("*"))
        except (OSError, ValueError):
            continue
        if not _is_of(run, directory) and time.time() - newest > OLD:
            yield directory


def _is_of(run: Path, directory: Path) -> bool:
    """Whether a run has these states: another may stand where it was, with a key of its own."""
    try:
        key = (run / "key").read_text(encoding="utf-8").strip()
    except OSError:
        return False
    return flash_directory(directory.parent, key) == directory
