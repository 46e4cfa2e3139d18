"""``z2a parallel show``: what every rank of a layout would hold, computed on one CPU without a weight in memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from zero2all.errors import UsageError, Z2aError
from zero2all.hardware import compute_dtype, dtype_name
from zero2all.model import Z2all
from zero2all.parallel.laid import Laid
from zero2all.parallel.layout import Layout, Sizes
from zero2all.parallel.memory import RankMemory, rank_memory
from zero2all.recipe import ModelConfig, Recipe

BYTES = 4  # parameters are kept in fp32


@dataclass(frozen=True)
class StageShare:
    """What the ranks of one pipeline rank hold."""

    stage: int
    layers: list[int]
    parameters: int
    """Elements of the stage, before shards."""
    least: int
    most: int
    """Elements on the rank with the fewest and on that with the most."""
    memory: RankMemory
    """Of the rank with the most."""
    examples: dict[str, str]
    """Some parameters: whole shape, placements, shape on a rank."""


def show_layout(recipe: Recipe, world: int) -> dict[str, Any]:
    """The mesh, the share of every pipeline rank and its bytes; checked to add up to the whole model."""
    config = recipe.model
    if config.vocab_size is None:
        config = config.model_copy(update={"vocab_size": recipe.tokenizer.vocab_size})
    sizes = Sizes.of(recipe.parallel, world)
    with torch.device("meta"):
        whole = sum(parameter.numel() for parameter in Z2all(config).parameters())
    shares = [_share(config, recipe, sizes, stage) for stage in range(sizes.pp)]
    held = sum(share.parameters for share in shares)
    if held != whole:
        raise Z2aError(f"the ranks hold {held} parameters, the model has {whole}: this is a bug in zero2all")
    return {
        "world": world,
        "mesh": {name: getattr(sizes, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")},
        "parameters": whole,
        "bytes": whole * BYTES,
        "compute_dtype": dtype_name(_compute_dtype(recipe)),
        "memory_per_rank": _described_memory(max((share.memory for share in shares), key=lambda memory: memory.total)),
        "stages": [vars(share) | {"memory": _described_memory(share.memory)} for share in shares],
    }


def _described_memory(memory: RankMemory) -> dict[str, int]:
    return asdict(memory) | {"total": memory.total}


def _compute_dtype(recipe: Recipe) -> torch.dtype:
    """On paper there is no device to ask: auto is taken to be bf16."""
    precision = recipe.train.precision
    return compute_dtype("bf16" if precision == "auto" else precision, torch.device("cpu"))


@contextmanager
def _as_rank(rank: int, world: int) -> Iterator[None]:
    """Be one of so many ranks whose collectives do nothing."""
    if dist.is_initialized():
        raise UsageError("this process is a rank of a group already; run 'z2a parallel show' on its own")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _share(config: ModelConfig, recipe: Recipe, sizes: Sizes, stage: int) -> StageShare:
    """Lay out as the first rank of a stage, then count for all ranks of it."""
    with nullcontext() if sizes.world == 1 else _as_rank(stage * (sizes.world // sizes.pp), sizes.world):
        laid = Laid(config, recipe.parallel, Layout(sizes, torch.device("cpu")), _compute_dtype(recipe))
        return _counted(laid, recipe, sizes, stage)


def _counted(laid: Laid, recipe: Recipe, sizes: Sizes, stage: int) -> StageShare:
    names = {name: parameter for part in laid.parts for name, parameter in part.named_parameters()}
    counts: dict[Any, list[int]] = {}  # parameters of one shape on one mesh are alike
    shards: dict[str, int] = {}  # elements on the rank with the most
    least = total = 0
    for name, parameter in names.items():
        if not isinstance(parameter, DTensor):
            on_ranks = [parameter.numel()]
        else:
            key = (parameter.shape, parameter.device_mesh, parameter.placements)
            if key not in counts:
                counts[key] = _elements_by_rank(parameter)
            on_ranks = counts[key]
            copies = math.prod(
                size
                for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True)
                if placement.is_replicate()
            )
            if sum(on_ranks) != parameter.numel() * copies:
                raise Z2aError(f"the shards of {name} do not add up to it: this is a bug in zero2all")
        total += parameter.numel()
        least += min(on_ranks)
        shards[name] = max(on_ranks)
    layers = sorted(int(name) for part in laid.parts for name, _ in part.layers.named_children())
    picked = [f"layers.{layers[0]}.self_attn.q_proj.weight", f"layers.{layers[0]}.mlp.down_proj.weight"]
    examples = {
        name: _described(names[name]) for name in ("embed_tokens.weight", *picked, "lm_head.weight") if name in names
    }
    memory = rank_memory(laid, shards, recipe, sizes, _compute_dtype(recipe))
    return StageShare(stage, layers, total, least, sum(shards.values()), memory, examples)


def _elements_by_rank(parameter: DTensor) -> list[int]:
    """Elements of a parameter on each rank of its mesh."""
    shape = parameter.device_mesh.shape
    found = []
    for place in itertools.product(*map(range, shape)):
        local, _ = _compute_local_shape_and_global_offset(
            parameter.shape, shape, place.__getitem__, parameter.placements
        )
        found.append(math.prod(local))
    return found


def _described(parameter: torch.Tensor) -> str:
    if not isinstance(parameter, DTensor):
        return f"{tuple(parameter.shape)}, whole"
    names = parameter.device_mesh.mesh_dim_names or ()
    cuts = ", ".join(
        f"{name}: {'copied' if placement.is_replicate() else f'cut at {placement.dim}'}"  # type: ignore[attr-defined]
        for name, placement in zip(names, parameter.placements, strict=True)
    )
    return f"{tuple(parameter.shape)} over {cuts}; {tuple(parameter.to_local().shape)} on a rank"
