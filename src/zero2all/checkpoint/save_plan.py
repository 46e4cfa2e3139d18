"""Plans a durable save without a coordinator: which of the tensors that several ranks hold does each rank write?

DCP gathers the plans of all ranks on rank 0, in Python, at every save: minutes at a thousand ranks, while training
waits for the same interpreter. Here rank 0 gets one hash for each shard, once for a layout, and each rank one bit for
each of its own.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItem

from zero2all.checkpoint.rank_group import RankGroup

KEY_DTYPE: Final = np.dtype([("high", "<u8"), ("low", "<u8"), ("bytes", "<i8")])
Keys = NDArray[Any]  # of KEY_DTYPE


class SavePlanCache:
    """The write items of this rank, planned again only when the shards of a rank have changed."""

    def __init__(self) -> None:
        self._keys: Keys | None = None
        self._chosen: NDArray[np.bool_] = np.zeros(0, bool)

    def write_items(self, shards: dict[str, Tensor], rank_group: RankGroup) -> list[WriteItem]:
        """Called on all ranks."""
        items = [
            item
            for item in create_default_local_save_plan(shards, is_coordinator=True).items
            if not _is_empty_shard(item)
        ]
        keys = shard_keys(items)
        is_known = self._keys is not None and np.array_equal(self._keys, keys)
        if not rank_group.reduce(lambda: is_known, operator.and_):
            self._chosen = np.unpackbits(
                np.frombuffer(rank_group.scatter(keys.tobytes, _pack_writers), np.uint8), count=len(keys)
            ).astype(bool)
            self._keys = keys
        return [item for item, is_chosen in zip(items, self._chosen, strict=True) if is_chosen]


def _is_empty_shard(item: WriteItem) -> bool:
    """Ranks without a part of a tensor: the offsets of an empty shard may be those of another."""
    assert item.tensor_data is not None
    return 0 in item.tensor_data.chunk.sizes and 0 not in item.tensor_data.size


def shard_keys(items: Sequence[WriteItem]) -> Keys:
    """What identifies each shard, and its size. A hash of 128 bits: no two shards of a run have the same."""
    keys = np.zeros(len(items), KEY_DTYPE)
    for number, item in enumerate(items):
        text = f"{item.index.fqn}\0{tuple(item.index.offset or ())}"
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        keys[number] = (*np.frombuffer(digest, "<u8"), item.tensor_storage_size() or 0)
    return keys


def assign_writers(keys: Sequence[Keys]) -> list[NDArray[np.bool_]]:
    """For every rank, which of its shards it writes: each shard once, and replicas evenly by bytes."""
    rank = np.repeat(np.arange(len(keys)), [len(of_rank) for of_rank in keys])
    everything = np.concatenate(keys)
    order = np.lexsort((rank, everything["low"], everything["high"]))
    high, low = everything["high"][order], everything["low"][order]
    is_first = np.concatenate([[True], (high[1:] != high[:-1]) | (low[1:] != low[:-1])])[: len(order)]
    starts = np.flatnonzero(is_first)
    copies = np.diff(starts, append=len(order))
    holders = np.add.reduceat(_mix(rank[order]), starts) if len(starts) else starts
    # Shards that the same ranks hold are dealt out in turn, the largest first; back and forth, so that nobody has the
    # larger one of every round.
    dealt = np.lexsort((low[starts], -everything["bytes"][order][starts], holders, copies))
    is_new = np.concatenate([[True], (np.diff(holders[dealt]) != 0) | (np.diff(copies[dealt]) != 0)])[: len(dealt)]
    first = np.flatnonzero(is_new)
    turn = np.arange(len(dealt)) - np.repeat(first, np.diff(first, append=len(dealt)))
    count = copies[dealt]
    forward, position = (turn // count) % 2 == 0, turn % count
    chosen = np.zeros(len(order), bool)
    chosen[order[starts[dealt] + np.where(forward, position, count - 1 - position)]] = True
    return np.split(chosen, np.cumsum([len(of_rank) for of_rank in keys])[:-1])


def _pack_writers(keys: Sequence[bytes]) -> list[bytes]:
    """``assign_writers`` in bits: all that a rank gets."""
    return [np.packbits(chosen).tobytes() for chosen in assign_writers([np.frombuffer(one, KEY_DTYPE) for one in keys])]


def _mix(rank: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A hash of each rank: their sum stands for the set of ranks. Equal sums of other sets cost balance only."""
    mixed = (rank.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
