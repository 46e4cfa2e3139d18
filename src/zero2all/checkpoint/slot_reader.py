"""A DCP storage reader for states in memory."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future as TorchFuture

from zero2all.checkpoint.flash import ShardSpec, StagedSlot


class SlotReader(StorageReader):
    """Reads the slots of one state, so that it can be resharded to another parallel layout."""

    def __init__(self, slots: list[StagedSlot]) -> None:
        self._slots = slots
        self._shard_locations: dict[MetadataIndex, tuple[Path, ShardSpec]] = {}
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: Any = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    def load(self, tensors: dict[str, Any]) -> None:
        """Fill tensors in place. No collective: each rank plans its reads from the slots it was given."""
        state_dict_loader.load(tensors, storage_reader=self, no_dist=True)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = self._collect_metadata()
        return self._metadata

    def _collect_metadata(self) -> Metadata:
        known: dict[str, TensorStorageMetadata] = {}
        for slot in self._slots:
            for spec in slot.shard_specs():
                if spec.bytes == 0 and 0 not in spec.size:
                    continue  # an empty shard may have the offsets of another
                properties = TensorProperties(dtype=getattr(torch, spec.dtype))
                entry = known.setdefault(spec.name, TensorStorageMetadata(properties, torch.Size(spec.size), []))
                chunk = ChunkStorageMetadata(torch.Size(spec.offsets), torch.Size(spec.sizes))
                index = MetadataIndex(spec.name, chunk.offsets)
                if index not in self._shard_locations:  # replicas on several ranks
                    entry.chunks.append(chunk)
                    self._shard_locations[index] = (slot.data, spec)
        return Metadata(state_dict_metadata=dict(known))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        opened: dict[Path, Tensor] = {}
        for item in plan.items:
            path, spec = self._shard_locations[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]
            if path not in opened:
                with open(path, "rb") as stream:
                    mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
                opened[path] = torch.frombuffer(mapped, dtype=torch.uint8)
            source = spec.view(opened[path])
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        done: TorchFuture[None] = TorchFuture()
        done.set_result(None)
        return done
