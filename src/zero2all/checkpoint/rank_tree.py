"""Bytes from every rank to rank 0 and back along a tree of small gloo groups.

One gloo group over all ranks connects every rank with every other: a thousand sockets on each of a thousand ranks.
Here each rank has a group with its parent and siblings, and one with its children: at most twice ``FAN_OUT`` sockets,
whatever the number of ranks. A rank that dies closes its connections, so those that wait for it fail at once.
"""

from __future__ import annotations

import struct
from datetime import timedelta
from typing import Any

import torch

from zero2all.torch_private import PrefixStore, Store, gloo_group

FAN_OUT = 32  # children of a rank: 1,024 ranks are two levels below rank 0, 33,000 are three
_LENGTH_TAG, _PAYLOAD_TAG = 0, 1
_ENTRY = struct.Struct("<qq")  # rank, and length of its bytes


class RankTree:
    """The place of one rank in the tree. Each call is made by all ranks, in the same order.

    >>> parts = RankTree(store, rank, world_size=1024, timeout=timedelta(hours=1)).gather(b"mine")
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta, fan_out: int = FAN_OUT) -> None:
        """``store`` is for this tree alone: ranks find each other by it."""
        self.rank, self.world_size, self._fan_out = rank, world_size, fan_out
        self._above: Any = None
        self._place = 0  # in the group of the parent, whose own is 0
        self._below: Any = None
        if rank > 0:
            parent = (rank - 1) // fan_out
            self._place = rank - fan_out * parent
            self._above = self._group(store, parent, self._place, timeout)
        if self.children:
            self._below = self._group(store, rank, 0, timeout)

    @property
    def children(self) -> range:
        first = self._fan_out * self.rank + 1
        return range(first, min(first + self._fan_out, self.world_size))

    def gather(self, mine: bytes) -> dict[int, bytes]:
        """What every rank below this one gave, and ``mine``; on rank 0 that is all of them."""
        parts = {self.rank: mine}
        for place, _ in enumerate(self.children, 1):
            parts |= unpack(_receive(self._below, place))
        if self._above is not None:
            _send(self._above, 0, pack(parts))
        return parts

    def broadcast(self, payload: bytes) -> bytes:
        """What rank 0 gave."""
        if self._above is not None:
            payload = _receive(self._above, 0)
        for place, _ in enumerate(self.children, 1):
            _send(self._below, place, payload)
        return payload

    def _group(self, store: Store, parent: int, place: int, timeout: timedelta) -> Any:
        first = self._fan_out * parent + 1
        size = 1 + min(self._fan_out, self.world_size - first)
        return gloo_group(PrefixStore(f"family/{parent}", store), place, size, timeout)


def pack(parts: dict[int, bytes]) -> bytes:
    """Bytes by rank, as bytes."""
    heads = b"".join(_ENTRY.pack(rank, len(part)) for rank, part in parts.items())
    return b"".join([len(parts).to_bytes(8, "little"), heads, *parts.values()])


def unpack(packed: bytes) -> dict[int, bytes]:
    count = int.from_bytes(packed[:8], "little")
    offset, parts = 8 + count * _ENTRY.size, {}
    for rank, length in _ENTRY.iter_unpack(packed[8:offset]):
        parts[rank] = packed[offset : offset + length]
        offset += length
    return parts


def _send(group: Any, to: int, payload: bytes) -> None:
    group.send([torch.tensor([len(payload)])], to, _LENGTH_TAG).wait()
    if payload:
        group.send([torch.frombuffer(bytearray(payload), dtype=torch.uint8)], to, _PAYLOAD_TAG).wait()


def _receive(group: Any, sender: int) -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    group.recv([length], sender, _LENGTH_TAG).wait()
    payload = torch.empty(int(length), dtype=torch.uint8)
    if len(payload):
        group.recv([payload], sender, _PAYLOAD_TAG).wait()
    return payload.numpy().tobytes()
