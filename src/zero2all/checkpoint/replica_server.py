"""Every rank of a job on several nodes listens: it takes replicas of other ranks' states, and sends what its node has.

The other side must know the job secret. Even then it decides nothing but the bytes of a slot: which ranks' states
are kept here, where and how large they are was agreed on before.
"""

from __future__ import annotations

import json
import mmap
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from zero2all.base.errors import Z2aError
from zero2all.base.io import read_record, write_text
from zero2all.base.network.connection import Address, Connection
from zero2all.base.records import parse_record
from zero2all.checkpoint.flash import Slot
from zero2all.checkpoint.peers import PeerServer, connect_peer
from zero2all.checkpoint.slot_format import LAYOUT_FILE, ShardSpec, SlotHeader, padded_bytes, slot_bytes
from zero2all.checkpoint.staged_slot import StagedSlot, find_staged_slots
from zero2all.checkpoint.training_state import contains_state

MAX_LAYOUT_BYTES = 256 << 20
MAX_DIMENSIONS = 64


class RejectedStateError(Z2aError):
    """A state from a peer that is not valid, or not what was agreed on."""


class ReplicaSlots:
    """Receives states into a directory. A slot is overwritten only while the other one is valid, or if it is not.

    >>> slots = ReplicaSlots(directory / "replica-5-of-8", size=5 << 20)
    >>> slots.receive(header, layout, fill)   # ``fill`` writes the bytes into the memory it is given
    """

    def __init__(self, directory: Path, size: int) -> None:
        """Allocates memory for two states of ``size`` bytes; an OSError says that there is not enough."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.directory, self.size = directory, padded_bytes(size)
        self._slots = [self._open(number) for number in range(2)]

    def _open(self, number: int) -> Slot:
        path = self.directory / f"slot-{number}.bin"
        with suppress(FileNotFoundError):
            if path.stat().st_size != self.size:  # of another layout
                path.with_suffix(".json").unlink(missing_ok=True)
        return Slot(self.size, path)

    def receive(self, header: SlotHeader, layout: bytes, fill: Callable[[memoryview], None]) -> None:
        """Raises an error if the state is not valid; then the slot stays invalid, and the other one as it was."""
        self._check(header, layout)
        self._set_layout(layout.decode())
        slot = self._slot_to_overwrite(header)
        slot.begin(header.step, header.lineage)
        fill(slot.data.numpy().data)
        if (problem := slot.adopt(header)) is not None:
            raise RejectedStateError(f"the state of step {header.step} is rejected: {problem}")

    def _check(self, header: SlotHeader, layout: bytes) -> None:
        if header.step < 0 or header.hash is None or header.state is None:
            raise RejectedStateError("an incomplete marker")
        try:
            specs = parse_record(list[ShardSpec], json.loads(layout.decode()), "the layout of a peer")
        except (ValueError, RecursionError) as error:
            raise RejectedStateError(f"a layout that is not JSON: {error}") from None
        for spec in specs:
            _check_spec(spec)
        if padded_bytes(slot_bytes(specs)) != self.size:
            raise RejectedStateError(f"a layout of {slot_bytes(specs)} bytes for a slot of {self.size}")

    def _set_layout(self, layout: str) -> None:
        """Both slots share it: with another one neither is valid."""
        path = self.directory / LAYOUT_FILE
        with suppress(OSError, UnicodeDecodeError):
            if path.read_text(encoding="utf-8") == layout:
                return
        for slot in self._slots:
            slot.marker.unlink(missing_ok=True)
        write_text(path, layout)

    def _slot_to_overwrite(self, header: SlotHeader) -> Slot:
        """One without a valid state, or with one that the new state's history has abandoned; else the older one."""

        def worth(slot: Slot) -> int:
            try:
                held = read_record(SlotHeader, slot.marker)
            except (OSError, Z2aError):
                return -1
            if held.hash is None or held.step >= header.step:
                return -1  # the same state again: the one held is damaged
            return held.step if contains_state(header.lineage, held.step, held.lineage[-1].history) else -1

        return min(self._slots, key=worth)


def _check_spec(spec: ShardSpec) -> None:
    """It names memory inside the slot, and a tensor that torch can make of it."""
    dtype = getattr(torch, spec.dtype, None)
    numbers = [spec.at, spec.bytes, *spec.size, *spec.offsets, *spec.sizes]
    elements = 1
    for length in spec.sizes[:MAX_DIMENSIONS]:
        elements *= length
    if (
        not isinstance(dtype, torch.dtype)
        or min(numbers) < 0
        or max(numbers) >= 1 << 62
        or not len(spec.size) == len(spec.offsets) == len(spec.sizes) <= MAX_DIMENSIONS
        or elements * dtype.itemsize != spec.bytes
    ):
        raise RejectedStateError(f"a layout in which {spec.name[:80]!r} is no tensor")


@dataclass(frozen=True)
class ReplicaRequest:
    """The first message of a connection; there is one for each state."""

    operation: Literal["store", "fetch"]
    rank: int
    world_size: int
    step: int
    history: str
    layout_bytes: int = 0
    data_bytes: int = 0
    header: SlotHeader | None = None


@dataclass(frozen=True)
class Reply:
    problem: str | None = None
    layout_bytes: int = 0
    data_bytes: int = 0
    header: SlotHeader | None = None


BUSY_WAIT = 2.0  # seconds: a rank that reconnects may come before the end of its earlier connection is seen


class ReplicaServer(PeerServer):
    """
    >>> server = ReplicaServer("10.0.0.1", secret, flash_directory)
    >>> server.address
    Address(host='10.0.0.1', port=41213)
    """

    def __init__(self, host: str, secret: bytes, flash_directory: Path) -> None:
        self._flash_directory = flash_directory
        self._held: dict[tuple[int, int], tuple[ReplicaSlots, threading.Lock]] = {}
        super().__init__(host, secret)

    def hold(self, held: dict[tuple[int, int], ReplicaSlots]) -> None:
        """Accept the states of these ranks, by rank and world size, from now on."""
        self._held = {key: (slots, threading.Lock()) for key, slots in held.items()}

    def answer(self, peer: Connection) -> None:
        request = peer.receive(ReplicaRequest)
        if request.operation == "store":
            self._store(peer, request)
        else:
            self._give(peer, request)

    def _store(self, peer: Connection, request: ReplicaRequest) -> None:
        slots, lock = self._held.get((request.rank, request.world_size), (None, threading.Lock()))
        if slots is None:
            peer.send(Reply(f"no replicas of rank {request.rank} of {request.world_size} are kept here"))
            return
        if request.header is None or request.data_bytes != slots.size or not _fits(request.layout_bytes):
            peer.send(Reply(f"{request.data_bytes} bytes do not fit a slot of {slots.size} bytes"))
            return
        if not lock.acquire(timeout=BUSY_WAIT):
            peer.send(Reply("another state of this rank is being received"))
            return
        problem = None
        try:
            peer.send(Reply())  # before anything is sent for nothing
            receive_state(peer, slots, request.header, request.layout_bytes)
        except RejectedStateError as error:
            problem = str(error)
        finally:
            lock.release()
        # After the release: a sender that has this reply may send the next state at once.
        peer.send(Reply(problem))

    def _give(self, peer: Connection, request: ReplicaRequest) -> None:
        for slot in find_staged_slots(self._flash_directory):
            if slot.header.hash is not None and _is_requested(slot, request):
                break
        else:
            peer.send(Reply("it is not held here"))
            return
        layout = slot.data.with_name(LAYOUT_FILE).read_bytes()
        with (
            open(slot.data, "rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as data,
        ):
            peer.send(Reply(None, len(layout), len(data), slot.header))
            peer.send_bytes(memoryview(layout))
            peer.send_bytes(data)


def receive_state(peer: Connection, slots: ReplicaSlots, header: SlotHeader, layout_bytes: int) -> None:
    layout = bytearray(layout_bytes)
    peer.receive_bytes(memoryview(layout))
    slots.receive(header, bytes(layout), peer.receive_bytes)


def fetch_state(address: Address, secret: bytes, request: ReplicaRequest, directory: Path, expected_bytes: int) -> None:
    """Copy a state that another node holds into ``directory``; an error says why it cannot be."""
    with connect_peer(address, secret) as peer:
        peer.send(request)
        reply = peer.receive(Reply)
        if reply.problem is not None or reply.header is None:
            raise RejectedStateError(reply.problem or "no marker")
        if (reply.header.step, reply.header.lineage[-1].history) != (request.step, request.history):
            raise RejectedStateError("it sent another state")
        if reply.data_bytes != expected_bytes or not _fits(reply.layout_bytes):
            raise RejectedStateError(f"it sent {reply.data_bytes} bytes, not {expected_bytes}")
        receive_state(peer, ReplicaSlots(directory, expected_bytes), reply.header, reply.layout_bytes)


def _fits(layout_bytes: int) -> bool:
    return 0 < layout_bytes <= MAX_LAYOUT_BYTES


def _is_requested(slot: StagedSlot, request: ReplicaRequest) -> bool:
    header = slot.header
    found = (slot.rank, slot.world_size, header.step, header.lineage[-1].history)
    return found == (request.rank, request.world_size, request.step, request.history)
