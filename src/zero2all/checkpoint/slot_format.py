"""File format of a state in memory: its marker, the offsets of its tensors, and its checksum.

``<place>/z2a-<run key>-<user>/rank-3-of-8/`` in a tmpfs holds ``layout.json`` (tensor offsets), and two slots:
``slot-0.bin``, raw bytes, and ``slot-0.json``, its marker. A slot is valid once its marker has a checksum, which is
written last; the other slot is not touched before that. ``replica-5-of-8/`` is the same for states of a rank on another
node. Nothing here is a pickle.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from zero2all.base.io import fingerprint
from zero2all.checkpoint.state_dict import local_shard
from zero2all.checkpoint.training_state import SavedLineage, TrainingState

LAYOUT_FILE = "layout.json"
ALIGNMENT = 64  # bytes
HASH_BLOCK = 1 << 20  # bytes under one hash


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


@dataclass(frozen=True)
class SlotHeader:
    """The marker of a slot; one that is not finished has only step and lineage."""

    step: int
    lineage: SavedLineage
    time: float | None = None
    layout: str | None = None
    hash: str | None = None
    state: TrainingState | None = None


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


def slot_bytes(specs: list[ShardSpec]) -> int:
    return max((spec.at + spec.bytes for spec in specs), default=0)


def padded_bytes(size: int) -> int:
    """The size of a slot's file: full blocks are hashed."""
    return -(-max(1, size) // HASH_BLOCK) * HASH_BLOCK


def layout_fingerprint(specs: list[ShardSpec]) -> str:
    """A fingerprint of the rank's weight shards. Optimizer state has the same sharding, but is created later."""
    return fingerprint([asdict(spec) for spec in specs if spec.name.startswith("model.")])


def slot_checksum(data: Tensor) -> str:
    """SHA-256 over the hashes of full blocks: finds any flipped bit, and reordered blocks, at memory bandwidth."""
    words = data.view(torch.int64).view(-1, HASH_BLOCK // 8)
    return hashlib.sha256(torch.hash_tensor(words, dim=1).numpy().tobytes()).hexdigest()
