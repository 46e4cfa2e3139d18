"""Gradient accumulation over micro-batches: what is held between them, and how often gradients are reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.parallel.helpers import BIAS_MOE, CPU, gradients, make_model, small_config
from tests.parallel.sharded_memory import RankMemory, dry_run
from zero2all.bench.rank_harness import run_ranks
from zero2all.model import ModelInputs
from zero2all.parallel import ParallelDims, ParallelModel
from zero2all.parallel.gradient_sync import fsdp_param_groups
from zero2all.recipe import ModelConfig, ParallelRecipe, Recipe

RANKS, MICROS, LENGTH, VOCAB = 4, 4, 16, 128


@dataclass(frozen=True)
class Held:
    between: list[float]
    """Bytes of gradient between micro-batches, per parameter of the unsharded part of the model."""
    most: int
    """The same in all, at most."""
    dtypes: set[torch.dtype]
    reduce_scatters: float
    all_reduces: float
    """Calls for each FSDP parameter group."""
    off: float
    """Largest relative difference of a gradient from one process, with the same compute dtype."""


def tensors(parallel_model: ParallelModel) -> Iterator[Tensor]:
    """Everything that holds a gradient on this rank."""
    for group in groups(parallel_model):
        if group._partial_reduce_output is not None:
            yield group._partial_reduce_output
        for parameter in group.fsdp_params:
            unsharded = getattr(parameter, "_unsharded_param", None)
            held = [parameter.sharded_param.grad, parameter.unsharded_accumulated_grad]
            held.append(None if unsharded is None else unsharded.grad)
            yield from (t.to_local() if isinstance(t, DTensor) else t for t in held if t is not None)


def groups(parallel_model: ParallelModel) -> list[Any]:
    pipeline = parallel_model._parts.pipeline
    roots = parallel_model.model_parts if pipeline is None else pipeline.stages
    return [group for root in roots for group in fsdp_param_groups(root)]


def config(moe: bool) -> ModelConfig:
    experts = {**BIAS_MOE, "moe_intermediate_size": 32} if moe else None
    return small_config(num_hidden_layers=4, num_key_value_heads=4, vocab_size=VOCAB, moe=experts)


def accumulate(sizes: dict[str, Any], moe: bool, dtype: torch.dtype, one: dict[str, Tensor]) -> Held:
    from torch.distributed.pipelining import PipelineStage

    parallel_model = make_model(sizes, config(moe), seed=3, dtype=dtype)
    samples = MICROS * parallel_model.mesh.dims.dp
    unsharded = sum(parameter._orig_size.numel() for group in groups(parallel_model) for parameter in group.fsdp_params)
    between: list[float] = []
    dtypes: set[torch.dtype] = set()

    def note(*_: object) -> None:
        found = list(tensors(parallel_model))
        if found:  # before the first backward there is nothing
            between.append(sum(t.numel() * t.element_size() for t in found) / unsharded)
            dtypes.update(t.dtype for t in found)

    counts = dict.fromkeys(("reduce_scatter_single", "all_reduce"), 0)

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def call(*args: Any, **more: Any) -> Any:
            counts[name] += 1
            return original(*args, **more)

        return call

    def noted(name: str) -> Callable[..., None]:
        original = getattr(PipelineStage, name)

        def call(*args: Any, **more: Any) -> None:
            original(*args, **more)
            note()

        return call

    patch = pytest.MonkeyPatch()
    for name in ("backward_one_chunk", "backward_weight_one_chunk"):
        patch.setattr(PipelineStage, name, noted(name))
    for name in counts:
        patch.setattr(dist, name, counted(name))
    hook = parallel_model.model.register_forward_pre_hook(note)
    tokens = torch.randint(0, VOCAB, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    own = tokens[slice(*parallel_model.mesh.sample_range(samples))]
    parallel_model.forward_backward(ModelInputs(own[:, :-1], own[:, 1:]), divisor=samples * LENGTH, micro_batch_size=1)
    patch.undo()
    hook.remove()
    off = max(
        float((gradient - one[name]).norm() / one[name].norm()) for name, gradient in gradients(parallel_model).items()
    )
    number = sum(group.mesh_info.shard_mesh_size > 1 or sizes.get("dp_shard") == 1 for group in groups(parallel_model))
    most = round(max(between) * unsharded)
    return Held(between, most, dtypes, counts["reduce_scatter_single"] / number, counts["all_reduce"] / number, off)


def alone(samples: int, moe: bool) -> dict[str, Tensor]:
    parallel_model = make_model({}, config(moe), seed=3)
    tokens = torch.randint(0, VOCAB, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    parallel_model.forward_backward(ModelInputs(tokens[:, :-1], tokens[:, 1:]), divisor=samples * LENGTH)
    return gradients(parallel_model)


ZERO = {"every": 3, "last": 1}  # the stage that reduces gradients with every micro-batch, or with the last
CASES: dict[str, tuple[dict[str, Any], bool, tuple[str, ...]]] = {
    "FSDP 4": ({}, False, ("every", "last")),
    "HSDP 2x2": ({"dp_replicate": 2}, False, ("every", "last")),
    "FSDP 2 x TP 2": ({"tp": 2}, False, ("every",)),
    "EP 4": ({"ep": 4}, True, ("every",)),
    "FSDP 2 x PP 2": ({"pp": 2}, False, ("every", "last")),
    "FSDP 2 x PP 2 zbv": ({"pp": 2, "schedule": "zbv"}, False, ("every", "last")),
    "HSDP 2x1 x PP 2 zbv": ({"pp": 2, "schedule": "zbv", "dp_replicate": 2, "dp_shard": 1}, False, ("every",)),
}


def shape_of(sizes: dict[str, Any], ranks: int = RANKS) -> ParallelDims:
    return ParallelDims.from_recipe(ParallelRecipe(**sizes), ranks)


def stated(sizes: dict[str, Any], moe: bool = False, ranks: int = RANKS, precision: str = "fp32") -> list[RankMemory]:
    """As the count on the sharded model states, for each pipeline rank."""
    batch = MICROS * shape_of(sizes, ranks).dp * LENGTH
    train = {"steps": 1, "seq_len": LENGTH, "batch_tokens": batch, "micro_batch_tokens": LENGTH, "precision": precision}
    model = {**config(moe).model_dump(), "vocab_size": None}
    recipe = Recipe.model_validate({"model": model, "train": train, "parallel": sizes})
    recipe = recipe.model_copy(update={"model": config(moe)})  # with a vocabulary smaller than any tokenizer's
    return [stage.memory for stage in dry_run(recipe, ranks, CPU).stages]


def buffers_sent() -> int:
    """How often DDP broadcasts buffers in two steps of two micro-batches."""
    parallel_model = make_model({"dp_replicate": RANKS, "dp_shard": 1}, config(moe=True), seed=3)
    sent: list[None] = []
    patch = pytest.MonkeyPatch()
    original = DistributedDataParallel._sync_buffers  # type: ignore[attr-defined]
    patch.setattr(DistributedDataParallel, "_sync_buffers", lambda ddp: (sent.append(None), original(ddp)))
    tokens = torch.randint(0, VOCAB, (2, LENGTH + 1))
    for _ in range(2):
        parallel_model.forward_backward(ModelInputs(tokens[:, :-1], tokens[:, 1:]), divisor=1, micro_batch_size=1)
    patch.undo()
    return len(sent)


def gathered_ahead() -> dict[str, list[bool]]:
    """With experts on their ranks: whether a block finds the next one being gathered, in forward and in backward; and
    whether the embedding is gathered in backward."""
    parallel_model = make_model({"ep": 2}, config(moe=True), seed=3)
    seen: dict[str, list[bool]] = {"forward": [], "backward": [], "embedding": []}

    def note(where: str, module: torch.nn.Module) -> Callable[..., None]:
        def call(*_: object) -> None:
            own = [group.is_unsharded or group._all_gather_result is not None for group in fsdp_param_groups(module)]
            seen[where].append(all(own))

        return call

    blocks = list(parallel_model.model.layers.children())
    for block, following in pairwise(blocks):
        block.self_attn.register_forward_pre_hook(note("forward", following))
    for block, following in pairwise(reversed(blocks)):
        block.mlp.register_full_backward_pre_hook(note("backward", following))
    blocks[0].self_attn.register_full_backward_pre_hook(note("embedding", parallel_model.model.embed_tokens))
    tokens = torch.randint(0, VOCAB, (1, LENGTH + 1))
    for _ in range(2):
        parallel_model.forward_backward(ModelInputs(tokens[:, :-1], tokens[:, 1:]), divisor=1)
    return seen


def everything(
    references: dict[tuple[int, bool], dict[str, Tensor]],
) -> tuple[dict[tuple[str, str], Held], int, dict[str, list[bool]]]:
    found = {}
    for name, (sizes, moe, modes) in CASES.items():
        one = references[MICROS * shape_of(sizes).dp, moe]
        for mode in modes:
            found[name, mode] = accumulate({**sizes, "zero": ZERO[mode]}, moe, torch.float32, one)
        if "zbv" in name or name == "FSDP 4":
            found[name, "bf16"] = accumulate(sizes, moe, torch.bfloat16, one)
    return found, buffers_sent(), gathered_ahead()


@pytest.mark.slow
def test_between_micro_batches_a_rank_holds_the_gradient_of_its_shards_only() -> None:
    references = {(MICROS * dp, moe): alone(MICROS * dp, moe) for dp in (2, 4) for moe in (False, True)}
    shown = {
        (name, mode): stated({**sizes, "zero": ZERO[mode]}, moe)
        for name, (sizes, moe, modes) in CASES.items()
        for mode in modes
    }
    for rank, (found, broadcasts, ahead) in enumerate(run_ranks(RANKS, everything, references, seconds=240)):
        assert ahead == {"forward": [True] * 6, "backward": [True] * 6, "embedding": [False] * 2}
        assert broadcasts == 0, "buffers are the same on every rank: each fills or computes its own"
        for (name, mode), held in found.items():
            sizes, where = shape_of(CASES[name][0]), f"{name}, {mode}, rank {rank}: {held}"
            assert len(held.between) >= MICROS - 1, where
            assert held.dtypes == {torch.float32}, where
            memory = shown[name, "every" if mode == "bf16" else mode][rank * sizes.pp // RANKS]
            assert held.most == pytest.approx(memory.gradients_between_micro_batches, rel=0.05), where
            assert held.off < (2e-2 if mode == "bf16" else 1e-5), where
            if sizes.ep == 1:  # else experts are on one rank alone anyway
                unsharded = 4.0 if mode == "last" else 4 / sizes.dp_shard
                assert max(held.between) == pytest.approx(unsharded, rel=0.01), where
            if sizes.dp_shard > 1:
                assert held.reduce_scatters == (1 if mode == "last" else MICROS), where
            if sizes.tp == 1:  # which has collectives of its own; between copies there is one in any case
                assert held.all_reduces == (1 if sizes.dp_replicate > 1 else 0), where
