"""Saves and loads are planned by every rank alone, and the result is what DCP's coordinator would have planned."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.checkpoint.helpers import TRAINING_STATE
from tests.ranks import on_ranks
from zero2all.base.errors import Z2aError
from zero2all.base.torch_private import storage_info
from zero2all.checkpoint import CheckpointStore, RankGroup
from zero2all.checkpoint import dcp_writer as metadata_module
from zero2all.checkpoint.chunk_index import INDEX_FILE, ChunkIndex
from zero2all.checkpoint.dcp_reader import read_index
from zero2all.checkpoint.dcp_writer import KEY_DTYPE, assign_writers
from zero2all.checkpoint.integrity import DamagedError
from zero2all.checkpoint.state_dict import training_state_dict
from zero2all.checkpoint.training_state import UNKNOWN_LINEAGE


def written_index(shapes: dict[str, tuple[int, ...]], rows_per_rank: int, ranks: int) -> ChunkIndex:
    """Every tensor split by its first dimension, as FSDP does it."""
    parts = []
    for rank in range(ranks):
        items, results = [], []
        for number, (name, shape) in enumerate(shapes.items()):
            offsets = torch.Size([rank * rows_per_rank, *([0] * (len(shape) - 1))])
            chunk = ChunkStorageMetadata(offsets, torch.Size([rows_per_rank, *shape[1:]]))
            data = TensorWriteData(chunk, torch.distributed.checkpoint.metadata.TensorProperties(), torch.Size(shape))
            index = MetadataIndex(name, offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            results.append(WriteResult(index, 10, storage_info(f"__{rank}_0.distcp", number * 10, 10)))
        parts.append(ChunkIndex.from_results(items, results))
    return ChunkIndex.merge([ChunkIndex.from_bytes(part.to_bytes()) for part in parts])


def test_the_chunks_selected_are_those_that_dcp_reads() -> None:
    shapes = {"a": (32, 5), "b": (32,), "c": (32, 3, 2)}
    index = written_index(shapes, 4, 8)
    everything, random_numbers = index.metadata(), random.Random(3)
    assert len(index) == 24
    for _ in range(200):
        name = random_numbers.choice(list(shapes))
        begin = [random_numbers.randrange(length) for length in shapes[name]]
        sizes = [
            random_numbers.randrange(length - first + 1) for length, first in zip(shapes[name], begin, strict=True)
        ]
        wanted = [ChunkStorageMetadata(torch.Size(begin), torch.Size(sizes))]
        entry = everything.state_dict_metadata[name]
        some = index.metadata({name: (begin, sizes)})
        selected = some.state_dict_metadata[name]
        plain, ours = (
            create_read_items_for_chunk_list(name, one, wanted) if all(sizes) else [] for one in (entry, selected)
        )
        assert plain == ours
        assert len(selected.chunks) == len(ours) or not all(sizes)
        assert [everything.storage_data[item.storage_index] for item in plain] == [
            some.storage_data[item.storage_index] for item in ours
        ]


def test_chunks_that_do_not_make_up_a_tensor_are_refused() -> None:
    with pytest.raises(Z2aError, match="the chunks of b on all ranks do not make up the tensor"):
        written_index({"a": (32, 5), "b": (33,)}, 4, 8)


@pytest.mark.parametrize("damage", ["cut", "file", "tensor", "dtype", "order"])
def test_a_damaged_index_is_no_index(damage: str) -> None:
    index = written_index({"a": (8, 5), "b": (8,)}, 4, 2)
    header = index.header
    if damage == "file":
        header.files[0] = "../other/__0_0.distcp"
    elif damage == "tensor":
        index.tensor[-1] = 7
    elif damage == "dtype":
        object.__setattr__(header.tensors[0], "dtype", "save")
    elif damage == "order":
        header.tensors.reverse()
    data = index.to_bytes()
    if damage == "cut":
        data = data[:-20]
    with pytest.raises(DamagedError, match=INDEX_FILE):
        ChunkIndex.from_bytes(data)


def random_keys(ranks: int, seed: int) -> list[np.ndarray]:
    """Some shards on one rank, some replicated on groups of ranks, some on all."""
    numbers = random.Random(seed)
    held: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for key in range(300):
        group = numbers.choice([1, 2, ranks])
        first = numbers.randrange(ranks // group) * group
        size = numbers.randrange(1, 100) << 10
        for rank in range(first, first + group):
            held[rank].append((key % 7, key, size))
    for of_rank in held:
        numbers.shuffle(of_rank)
    return [np.array(of_rank, KEY_DTYPE) for of_rank in held]


@pytest.mark.parametrize("seed", range(5))
def test_every_shard_is_written_once_and_replicas_are_balanced(seed: int) -> None:
    keys = random_keys(8, seed)
    chosen = assign_writers(keys)
    written = [int(row["low"]) for of_rank, mask in zip(keys, chosen, strict=True) for row in of_rank[mask]]
    assert sorted(written) == sorted({int(row["low"]) for of_rank in keys for row in of_rank})
    replicated = [np.array([(0, number, 1 << number % 8) for number in range(64)], KEY_DTYPE)] * 4
    loads = [
        int(of_rank["bytes"][mask].sum()) for of_rank, mask in zip(replicated, assign_writers(replicated), strict=True)
    ]
    assert max(loads) <= 1.1 * min(loads)


def test_nothing_to_write_is_a_plan_too() -> None:
    empty = np.zeros(0, KEY_DTYPE)
    assert [len(mask) for mask in assign_writers([empty, empty])] == [0, 0]


def tensors_of(mesh_shape: tuple[int, ...], placements: Sequence[Placement]) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", mesh_shape)
    # 5 rows on 4 ranks: one of them has an empty shard.
    whole = {"even": torch.arange(48.0).view(8, 6), "uneven": torch.arange(5.0), "plain": torch.arange(7.0)}
    sharded = {name: distribute_tensor(tensor, mesh, placements) for name, tensor in list(whole.items())[:2]}
    return {**sharded, "plain": whole["plain"], f"rng.{dist.get_rank()}": torch.tensor([float(dist.get_rank())])}


def save_and_load(directory: Path) -> list[str]:
    checkpoints, rank_group = CheckpointStore(directory, keep=3), RankGroup()
    saved = tensors_of((2, 2), [Replicate(), Shard(0)])
    gathered: list[int] = []
    for step in (1, 2):
        checkpoints.write(step, saved, TRAINING_STATE, UNKNOWN_LINEAGE, rank_group)
        gathered.append(len(checkpoints._writer._indexes))
    assert gathered == ([4, 4] if rank_group.rank == 0 else [0, 0])
    for placements in ([Shard(0)], [Replicate()]):
        wanted = tensors_of((4,), placements)
        for tensor in wanted.values():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.fill_(-1)
        by_dcp = {name: tensor.clone() for name, tensor in wanted.items()}
        checkpoints.reader(2).load(wanted)
        state_dict_loader.load(by_dcp, storage_reader=FileSystemReader(checkpoints.path(2)))
        for name, tensor in wanted.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            other = by_dcp[name].full_tensor() if isinstance(tensor, DTensor) else by_dcp[name]  # type: ignore[attr-defined]
            assert torch.equal(whole, other), name
            assert not (whole == -1).any(), name
    return sorted(path.name for path in checkpoints.path(2).iterdir())


def test_four_ranks_write_what_dcp_loads_in_another_layout(tmp_path: Path) -> None:
    names = on_ranks(4, save_and_load, tmp_path)[0]
    shards = [f"__{rank}_0.distcp" for rank in range(4)]
    assert names == sorted([".metadata", INDEX_FILE, "manifest.json", "state.json", *shards])
    first, second = ((tmp_path / f"step-0000000{step}" / ".metadata").read_bytes() for step in (1, 2))
    assert first == second


def fail_on_one(directory: Path) -> str:
    checkpoints, rank_group = CheckpointStore(directory), RankGroup()
    model = torch.nn.Linear(4, 4)
    state = training_state_dict(model, [torch.optim.SGD(model.parameters(), momentum=0.9)])
    checkpoints.write(1, state, TRAINING_STATE, UNKNOWN_LINEAGE, rank_group)
    try:
        # The second rank has a model that the checkpoint does not fit.
        other = model if rank_group.rank == 0 else torch.nn.Linear(5, 4)
        checkpoints.load(1, other, [torch.optim.SGD(other.parameters(), momentum=0.9)], rank_group)
    except Z2aError as error:
        return str(error)
    return ""


def test_one_rank_that_cannot_load_fails_on_all(tmp_path: Path) -> None:
    reasons = on_ranks(2, fail_on_one, tmp_path)
    assert all("Size mismatch" in reason for reason in reasons)
    assert "(on rank 1)" in reasons[0]


def test_metadata_that_another_process_makes_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = written_index({"a": (32, 5), "b": (32,)}, 4, 8)
    metadata_module.write_dcp_metadata(index, tmp_path / "here")
    monkeypatch.setattr(metadata_module, "MAX_CHUNKS_IN_PROCESS", 1)
    metadata_module.write_dcp_metadata(index, tmp_path / "there")
    assert (tmp_path / "here").read_bytes() == (tmp_path / "there").read_bytes()
    with pytest.raises(Z2aError, match=r"cannot be written: .*No such file"):
        metadata_module.write_dcp_metadata(index, tmp_path / "missing" / "there")


def test_an_index_of_another_metadata_is_not_used(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path)
    checkpoints.write(1, {"a": torch.arange(4.0)}, TRAINING_STATE, UNKNOWN_LINEAGE, RankGroup())
    assert read_index(checkpoints.path(1)) is not None
    metadata = checkpoints.path(1) / ".metadata"
    metadata.write_bytes(metadata.read_bytes() + b" ")
    assert read_index(checkpoints.path(1)) is None
    loaded = {"a": torch.zeros(4)}
    checkpoints.reader(1).load(loaded)  # by the other one
    assert torch.equal(loaded["a"], torch.arange(4.0))
