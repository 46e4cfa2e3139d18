"""The rows of ``z2a bench ops``: which kernels are fused, and sweeps over sizes with all of them fused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch

from zero2all.base.errors import UsageError
from zero2all.bench.step import Layout, StepOptions
from zero2all.model.ops import choose_kernels
from zero2all.model.ops.registry import OPS
from zero2all.recipe import ModelConfig, Recipe

KERNELS_TABLE = "kernels"
REFERENCE = "reference"
ADAMW = "adamw"
SUBSETS = (("attention",), ("attention", "cross_entropy", ADAMW))
"""Under torch.compile few fused kernels can be faster than all: it fuses the others itself."""
HEAD_SIZES = (16, 32, 64, 128, 256)

Sweep = Literal["vocabulary", "hidden", "heads", "micro-batch", "layout"]
SWEEPS: tuple[Sweep, ...] = get_args(Sweep)


@dataclass(frozen=True)
class StepVariant:
    """One configuration of the step."""

    table: str
    name: str
    recipe: Recipe
    options: StepOptions = field(default_factory=StepOptions)

    @property
    def compile(self) -> bool:
        return self.recipe.train.compile is True

    def with_compile(self, *, compile: bool) -> StepVariant:
        train = self.recipe.train.model_copy(update={"compile": compile})
        return replace(self, recipe=self.recipe.model_copy(update={"train": train}))


def kernel_variants(
    recipe: Recipe, device: torch.device, subsets: Sequence[Sequence[str]] = ()
) -> Iterator[StepVariant]:
    """None fused, all, all but one, one replaced by another fused kernel, only a few.

    Kernels are named explicitly, so that a row means the same in every process.
    """
    fused = {
        choice.op: choice.form
        for choice in choose_kernels(recipe.model, device).choices
        if choice.op != "experts" or recipe.model.moe
    }
    plain = dict.fromkeys(fused, REFERENCE)

    def variant(name: str, kernels: dict[str, str], *, plain_adamw: bool = False) -> StepVariant:
        model = recipe.model.model_copy(update={"ops": recipe.model.ops.model_copy(update=kernels)})
        return StepVariant(
            KERNELS_TABLE, name, recipe.model_copy(update={"model": model}), StepOptions(plain_adamw=plain_adamw)
        )

    yield variant("naive", plain, plain_adamw=True)
    yield variant("all fused", fused)
    for op, kernel in fused.items():
        if kernel != REFERENCE:
            yield variant(f"all but {op}", {**fused, op: REFERENCE})
    yield variant(f"all but {ADAMW}", fused, plain_adamw=True)
    for op, kernel in fused.items():
        for other in _other_kernels(op, kernel, recipe.model, device):
            yield variant(f"{op} {kernel} -> {other}", {**fused, op: other})
    for subset in (*SUBSETS, *subsets):
        if unknown := set(subset) - {*fused, ADAMW}:
            raise UsageError(f"no kernel of {', '.join(sorted(unknown))}; there are {', '.join([*fused, ADAMW])}")
        kernels = plain | {op: fused[op] for op in subset if op != ADAMW}
        yield variant(f"only {', '.join(subset)}", kernels, plain_adamw=ADAMW not in subset)


def _other_kernels(op: str, chosen: str, config: ModelConfig, device: torch.device) -> list[str]:
    """Fused ones that run here."""
    return [
        name
        for name, kernel in OPS[op].items()
        if name not in (chosen, REFERENCE) and kernel.unavailable_reason(device, config) is None
    ]


def find_sweep(name: str) -> Sweep:
    for sweep in SWEEPS:
        if sweep == name:
            return sweep
    raise UsageError(f"no sweep {name!r}; there are {', '.join(SWEEPS)}")


def sweep_variants(recipe: Recipe, sweeps: Sequence[Sweep]) -> Iterator[StepVariant]:
    for sweep in sweeps:
        yield from _SWEEP_ROWS[sweep](recipe)


def _with_model(recipe: Recipe, **sizes: Any) -> Recipe:
    model = ModelConfig.model_validate({**recipe.model.model_dump(), **sizes})
    return recipe.model_copy(update={"model": model})


def _vocabulary(recipe: Recipe) -> Iterator[StepVariant]:
    """A multiple of 64 rows, one row more, and what the model makes of that."""
    rows = recipe.model.padded_vocab_size
    yield StepVariant("vocabulary", f"{rows} rows", _with_model(recipe, vocab_size=rows))
    more = _with_model(recipe, vocab_size=rows + 1)
    yield StepVariant("vocabulary", f"{rows + 1} rows", more, StepOptions(unpadded_vocabulary=True))
    yield StepVariant("vocabulary", f"{rows + 1} tokens, padded to {rows + 64} rows", more)


def _hidden(recipe: Recipe) -> Iterator[StepVariant]:
    """Aligned and not, with the same heads."""
    for more in (0, 1, 8, 64):
        size = recipe.model.hidden_size + more
        yield StepVariant("hidden", str(size), _with_model(recipe, hidden_size=size, head_dim=recipe.model.head_size))


def _heads(recipe: Recipe) -> Iterator[StepVariant]:
    """Many small heads or few large ones, with the same parameters."""
    model = recipe.model
    queries, keys = (heads * model.head_size for heads in (model.num_attention_heads, model.num_key_value_heads))
    for size in HEAD_SIZES:
        if queries % size == 0 and keys % size == 0:
            heads = {"num_attention_heads": queries // size, "num_key_value_heads": keys // size, "head_dim": size}
            name = f"{queries // size} heads of {size}, {keys // size} key-value heads"
            yield StepVariant("heads", name, _with_model(recipe, **heads))


def _micro_batch(recipe: Recipe) -> Iterator[StepVariant]:
    """The same batch in fewer and fewer micro-batches."""
    train = recipe.train
    for samples in range(1, train.batch_samples + 1):
        if train.batch_samples % samples == 0 and samples.bit_count() == 1:
            tokens = samples * train.seq_len
            small = train.model_copy(update={"micro_batch_tokens": tokens})
            name = f"{samples} x {train.seq_len} tokens, {train.batch_samples // samples} micro-batches"
            yield StepVariant("micro-batch", name, recipe.model_copy(update={"train": small}))


def _layout(recipe: Recipe) -> Iterator[StepVariant]:
    for layout in get_args(Layout):
        yield StepVariant("layout", layout, recipe, StepOptions(layout=layout))


_SWEEP_ROWS = {
    "vocabulary": _vocabulary,
    "hidden": _hidden,
    "heads": _heads,
    "micro-batch": _micro_batch,
    "layout": _layout,
}
