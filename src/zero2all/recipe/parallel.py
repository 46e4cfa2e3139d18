"""How a model is laid over devices, and the rules that need no device to check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from zero2all.recipe.types import Section

if TYPE_CHECKING:
    from zero2all.recipe.sections import Recipe

Size = Annotated[int, Field(ge=1)]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]
SPLIT_BACKWARD = ("zero-bubble", "zbv")
"""Schedules that run the two halves of a backward apart."""


class ParallelRecipe(Section):
    """How a model is laid over devices. With everything as it is here, all ranks share one model in shards (FSDP).

    The product of dp_replicate, dp_shard, cp, tp and pp is the number of ranks; ep reuses ranks of dp_shard and cp.
    """

    dp_replicate: Size | Literal["auto"] = 1
    """Copies of the (sharded) model. Without any other size it is DDP, with dp_shard it is HSDP."""
    dp_shard: Size | Literal["auto"] = "auto"
    """Ranks that share one copy in shards (FSDP2). auto takes the ranks that are left."""
    tp: Size = 1
    """Ranks that share every matrix of a block."""
    sp: bool = True
    """Under tp, norms and the residual stream are cut along the sequence as well."""
    loss_parallel: bool = True
    """Under tp, the loss is computed from logits that stay cut along the vocabulary."""
    pp: Size = 1
    """Pipeline: ranks that hold the layers one after another."""
    schedule: Schedule = "1f1b"
    """Order of micro-batches in the pipeline. interleaved, zero-bubble and zbv give a rank two stages."""
    cp: Size = 1
    """Ranks that share every sequence."""
    cp_attention: Literal["gather", "ulysses"] = "gather"
    """gather: each rank sees all keys and values; ulysses: all positions of some heads."""
    ep: Size = 1
    """Ranks that share the experts of every MoE layer."""
    reshard: Literal["auto", "always", "never"] | Size = "auto"
    """Free a block's gathered weights after its forward, or down to groups of so many ranks. auto: not under pp."""
    gradient_sync: Literal["every", "last"] = "every"
    """When FSDP reduce-scatters the gradient: with every micro-batch, or with the last one only. last sends less, but
    every rank then holds the gradient of the unsharded model in fp32: 4 bytes for each parameter of its tp, pp and ep
    part. Copies (DDP, HSDP) are all-reduced with the last micro-batch in any case."""
    activation_checkpointing: Literal["none", "full", "selective", "budget"] = "none"
    """What backward computes anew: nothing, each block, all of it but matrices and attention, or by a budget."""
    activation_budget: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of activations that the budget keeps."""

    @model_validator(mode="after")
    def _one_auto(self) -> Self:
        if self.dp_replicate == "auto" and self.dp_shard == "auto":
            raise ValueError("only one of dp_replicate and dp_shard can be auto: set dp_shard=1 for plain copies (DDP)")
        return self

    @property
    def stages_per_rank(self) -> int:
        return 2 if self.pp > 1 and self.schedule in ("interleaved", *SPLIT_BACKWARD) else 1


def layout_problems(recipe: Recipe) -> list[str]:
    """Everything about a layout that cannot be, whatever the number of ranks; each says what to change."""
    return [message for wrong, message in _rules(recipe) if wrong]


def _rules(recipe: Recipe) -> Iterator[tuple[bool, str]]:
    """Pairs of what must not be and what to say if it is."""
    model, train, layout = recipe.model, recipe.train, recipe.parallel
    for name in ("n_heads", "n_kv_heads", "intermediate_size"):
        size = getattr(model, name)
        yield size % layout.tp != 0, f"parallel.tp ({layout.tp}) must divide model.{name} ({size})"
    rows = 0 if model.vocab_size is None else model.vocab_rows
    yield rows % layout.tp != 0, f"parallel.tp ({layout.tp}) must divide the {rows} rows of the vocabulary"
    pieces = 2 * layout.cp if layout.cp > 1 else 1
    cuts = layout.cp * layout.tp if layout.sp else layout.cp
    for length in dict.fromkeys(stage.seq_len for stage in train.resolved_stages()):
        yield length % pieces != 0, f"train.seq_len ({length}) must be a multiple of 2 x parallel.cp ({pieces})"
        yield (
            length % cuts != 0,
            f"train.seq_len ({length}) must be a multiple of cp x tp ({cuts}); or set parallel.sp=false",
        )
    heads = layout.cp * layout.tp if layout.cp > 1 and layout.cp_attention == "ulysses" else 1
    yield (
        model.n_kv_heads % heads != 0,
        f"ulysses cuts model.n_kv_heads ({model.n_kv_heads}) over cp x tp ({heads}) ranks: "
        "set parallel.cp_attention=gather",
    )
    yield (
        layout.activation_checkpointing == "budget" and not train.compile,
        "the compiler keeps the activation budget: set train.compile=true, or "
        "parallel.activation_checkpointing=selective",
    )
    yield (
        model.mtp_weight > 0 and max(layout.tp, layout.pp, layout.cp) > 1,
        "the block for the token after next is not cut: set model.mtp_weight=0, or use dp_shard instead of tp, pp, cp",
    )
    if layout.pp > 1:
        yield from _pipeline_rules(recipe)
    yield from _expert_rules(recipe)


def _pipeline_rules(recipe: Recipe) -> Iterator[tuple[bool, str]]:
    model, layout = recipe.model, recipe.parallel
    stages = layout.pp * layout.stages_per_rank
    yield (
        stages > model.n_layers,
        f"{stages} pipeline stages need as many layers, and model.n_layers is {model.n_layers}: lower parallel.pp"
        + (" or set parallel.schedule=1f1b" if layout.stages_per_rank > 1 else ""),
    )
    yield model.tied, "embedding and head are on different pipeline stages: set model.tied=false or parallel.pp=1"
    yield (
        layout.schedule in SPLIT_BACKWARD and recipe.train.compile,
        f"schedule {layout.schedule} cannot split a compiled backward: set train.compile=false or "
        "parallel.schedule=interleaved",
    )
    yield (
        layout.schedule in SPLIT_BACKWARD and layout.reshard not in ("auto", "never"),
        f"schedule {layout.schedule} loses the weight gradients of blocks that free their gathered weights: "
        "set parallel.reshard=auto, or parallel.schedule=interleaved",
    )
    yield (
        model.moe is not None and model.moe.balance == "aux",
        "the balance loss of early pipeline stages would be lost: set model.moe.balance=bias",
    )


def _expert_rules(recipe: Recipe) -> Iterator[tuple[bool, str]]:
    moe, layout = recipe.model.moe, recipe.parallel
    if moe is None:
        yield layout.ep > 1, f"parallel.ep is {layout.ep}, but the model has no experts: set it to 1, or give model.moe"
        return
    yield moe.experts % layout.ep != 0, f"parallel.ep ({layout.ep}) must divide model.moe.experts ({moe.experts})"
    yield layout.tp > 1, "experts are not cut by tp: set parallel.tp=1 and share them with parallel.ep"
