"""How a model is laid over devices, and the rules that need no device to check."""

from __future__ import annotations

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
    model, train, layout = recipe.model, recipe.train, recipe.parallel
    stages = layout.pp * layout.stages_per_rank
    ulysses = layout.cp > 1 and layout.cp_attention == "ulysses"
    cut_by_tp = {
        "model.n_heads": model.n_heads,
        "model.n_kv_heads": model.n_kv_heads,
        "model.intermediate_size": model.intermediate_size,
    }
    if model.vocab_size is not None:
        cut_by_tp["model.vocab_size"] = model.vocab_size
    problems = [
        f"parallel.tp ({layout.tp}) must divide {name} ({value})" for name, value in cut_by_tp.items() if value % layout.tp
    ]
    pieces = layout.cp * (layout.tp if layout.sp else 1)
    rules = [
        (
            layout.cp > 1 and train.seq_len % (2 * layout.cp) != 0,
            f"train.seq_len ({train.seq_len}) must be a multiple of 2 x parallel.cp ({2 * layout.cp})",
        ),
        (
            train.seq_len % pieces != 0,
            f"train.seq_len ({train.seq_len}) must be a multiple of {pieces} (cp x tp); or set parallel.sp=false",
        ),
        (
            ulysses and model.n_kv_heads % (layout.cp * layout.tp) != 0,
            f"ulysses cuts model.n_kv_heads ({model.n_kv_heads}) over cp x tp ({layout.cp * layout.tp}) ranks: "
            "set parallel.cp_attention=gather",
        ),
        (
            stages > model.n_layers,
            f"{stages} pipeline stages need as many layers, and model.n_layers is {model.n_layers}: lower parallel.pp"
            + (" or set parallel.schedule=1f1b" if layout.stages_per_rank > 1 else ""),
        ),
        (
            layout.pp > 1 and model.tied,
            "embedding and head are on different pipeline stages: set model.tied=false or parallel.pp=1",
        ),
        (
            layout.pp > 1 and layout.schedule in SPLIT_BACKWARD and train.compile,
            f"schedule {layout.schedule} cannot split a compiled backward: set train.compile=false or "
            "parallel.schedule=interleaved",
        ),
        (
            layout.activation_checkpointing == "budget" and not train.compile,
            "the compiler keeps the activation budget: set train.compile=true, or "
            "parallel.activation_checkpointing=selective",
        ),
    ]
    return problems + [message for wrong, message in rules if wrong]
