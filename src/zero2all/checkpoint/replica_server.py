"""Every rank of a job on several nodes listens: it takes replicas of other ranks' states, and sends what its node has.

The other side must know the job secret. Even then it decides nothing but the bytes of a slot: which ranks' states
are kept here, where and how large they are was agreed on before.
"""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zero2all.checkpoint.flash import SlotHeader, StagedSlot, find_staged_slots
from zero2all.checkpoint.peers import PeerServer, connect_peer
from zero2all.checkpoint.replica_slots import LAYOUT_FILE, MAX_LAYOUT_BYTES, RejectedStateError, ReplicaSlots
from zero2all.connection import Address, Connection


@dataclass(frozen=True)
class Request:
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
        """From now on take the states of these ranks, by rank and world size."""
        self._held = {key: (slots, threading.Lock()) for key, slots in held.items()}

    def answer(self, peer: Connection) -> None:
        request = peer.receive(Request)
        if request.operation == "store":
            self._store(peer, request)
        else:
            self._give(peer, request)

    def _store(self, peer: Connection, request: Request) -> None:
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

    def _give(self, peer: Connection, request: Request) -> None:
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


def fetch_state(address: Address, secret: bytes, request: Request, directory: Path, expected_bytes: int) -> None:
    """Copy a state that another node holds into ``directory``; an error says why it cannot be."""
    with connect_peer(address, secret) as peer:
        peer.send(request)
        reply = peer.receive(Reply)
        if reply.problem is not None or reply.header is None:
            raise RejectedStateError(reply.problem or "no marker")
        lineage = reply.header.lineage
        if lineage is None or (reply.header.step, lineage[-1].history) != (request.step, request.history):
            raise RejectedStateError("it sent another state")
        if reply.data_bytes != expected_bytes or not _fits(reply.layout_bytes):
            raise RejectedStateError(f"it sent {reply.data_bytes} bytes, not {expected_bytes}")
        receive_state(peer, ReplicaSlots(directory, expected_bytes), reply.header, reply.layout_bytes)


def _fits(layout_bytes: int) -> bool:
    return 0 < layout_bytes <= MAX_LAYOUT_BYTES


def _is_requested(slot: StagedSlot, request: Request) -> bool:
    header = slot.header
    return header.lineage is not None and (slot.rank, slot.world_size, header.step, header.lineage[-1].history) == (
        request.rank,
        request.world_size,
        request.step,
        request.history,
    )
