"""Bytes from every rank to rank 0 and back along a tree of small gloo groups.

One gloo group over all ranks connects every rank with every other: a thousand sockets on each of a thousand ranks.
Here each rank has a group with its parent and siblings, and one with its children: at most twice ``FAN_OUT`` sockets,
whatever the number of ranks. A rank that dies closes its connections, so those that wait for it fail at once.

A parent reads its children as they become ready and sends to all of them at once: the slowest one delays no other.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from zero2all.base.torch_private import PrefixStore, Store, gloo_group, receive_from_any

FAN_OUT = 32  # children of a rank: 1,024 ranks are two levels below rank 0, 33,000 are three
_LENGTH_TAG, _PAYLOAD_TAG = 0, 1
_ENTRY = struct.Struct("<qq")  # rank, and length of its bytes


class RankTree:
    """The place of one rank in the tree. Each call is made by all ranks, in the same order.

    A ``gather`` is followed by a ``broadcast`` or a ``scatter``: no child may send again before all siblings have.

    >>> merged = RankTree(store, rank, world_size=1024, timeout=timedelta(hours=1)).gather(b"mine", b"".join)
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta, fan_out: int = FAN_OUT) -> None:
        """``store`` is for this tree alone: ranks find each other by it."""
        self.rank, self.world_size, self._fan_out = rank, world_size, fan_out
        self.received_bytes = 0
        """Payloads that this rank has received."""
        self._above: Any = None
        self._place = 0  # in the group of the parent, whose own is 0
        self._below: Any = None
        if rank > 0:
            parent = self._parent(rank)
            self._place = rank - fan_out * parent
            self._above = self._group(store, parent, self._place, timeout)
        if self.children:
            self._below = self._group(store, rank, 0, timeout)

    @property
    def children(self) -> range:
        first = self._fan_out * self.rank + 1
        return range(first, min(first + self._fan_out, self.world_size))

    def gather(self, mine: bytes, merge: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Merge this rank's bytes with its children's, and pass them on. Rank 0 returns the bytes of all ranks."""
        merged = merge([mine, *self._receive_from_children()]) if self.children else mine
        if self._above is not None:
            _wait(_send(self._above, 0, merged))
        return merged

    def broadcast(self, payload: bytes) -> bytes:
        """The payload of rank 0."""
        if self._above is not None:
            payload = self._receive_from_parent()
        self._send_to_children(dict.fromkeys(self.children, payload))
        return payload

    def scatter(self, parts: dict[int, bytes]) -> bytes:
        """This rank's part of the parts that rank 0 has."""
        if self._above is not None:
            parts = unpack(self._receive_from_parent())
        below: dict[int, dict[int, bytes]] = {child: {} for child in self.children}
        for rank, part in parts.items():
            if rank != self.rank:
                below[self._child_towards(rank)][rank] = part
        self._send_to_children({child: pack(of_child) for child, of_child in below.items()})
        return parts[self.rank]

    def _parent(self, rank: int) -> int:
        return (rank - 1) // self._fan_out

    def _child_towards(self, rank: int) -> int:
        while self._parent(rank) != self.rank:
            rank = self._parent(rank)
        return rank

    def _receive_from_children(self) -> list[bytes]:
        """The bytes of each child in turn, received in the order in which the children send."""
        payloads: dict[int, torch.Tensor] = {}
        pending = []
        for _ in self.children:
            length = torch.zeros(1, dtype=torch.int64)
            place = receive_from_any(self._below, length, _LENGTH_TAG)
            payloads[place] = torch.empty(int(length), dtype=torch.uint8)
            if len(payloads[place]):
                pending.append(self._below.recv([payloads[place]], place, _PAYLOAD_TAG))
        _wait(pending)
        return [self._counted(payloads[place]) for place in sorted(payloads)]

    def _receive_from_parent(self) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        self._above.recv([length], 0, _LENGTH_TAG).wait()
        payload = torch.empty(int(length), dtype=torch.uint8)
        if len(payload):
            self._above.recv([payload], 0, _PAYLOAD_TAG).wait()
        return self._counted(payload)

    def _send_to_children(self, payloads: dict[int, bytes]) -> None:
        first = self.children.start
        _wait([work for child, payload in payloads.items() for work in _send(self._below, child - first + 1, payload)])

    def _counted(self, payload: torch.Tensor) -> bytes:
        self.received_bytes += len(payload)
        return payload.numpy().tobytes()

    def _group(self, store: Store, parent: int, place: int, timeout: timedelta) -> Any:
        first = self._fan_out * parent + 1
        size = 1 + min(self._fan_out, self.world_size - first)
        return gloo_group(PrefixStore(f"family/{parent}", store), place, size, timeout)


def pack(parts: dict[int, bytes]) -> bytes:
    """Pack the parts of all ranks into one message."""
    heads = b"".join(_ENTRY.pack(rank, len(part)) for rank, part in parts.items())
    return b"".join([len(parts).to_bytes(8, "little"), heads, *parts.values()])


def unpack(packed: bytes) -> dict[int, bytes]:
    count = int.from_bytes(packed[:8], "little")
    offset, parts = 8 + count * _ENTRY.size, {}
    for rank, length in _ENTRY.iter_unpack(packed[8:offset]):
        parts[rank] = packed[offset : offset + length]
        offset += length
    return parts


def _send(group: Any, to: int, payload: bytes) -> list[Any]:
    """Start to send, and return what to wait for."""
    sent = [group.send([torch.tensor([len(payload)])], to, _LENGTH_TAG)]
    if payload:
        sent.append(group.send([torch.frombuffer(bytearray(payload), dtype=torch.uint8)], to, _PAYLOAD_TAG))
    return sent


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
