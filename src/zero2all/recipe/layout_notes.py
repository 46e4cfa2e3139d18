"""What makes losses depend on the parallel layout by more than rounding."""

from __future__ import annotations

from collections.abc import Iterator

from zero2all.recipe.sections import Recipe


def layout_notes(recipe: Recipe) -> Iterator[str]:
    """For ``z2a recipe check``: what the recipe trains differently on a different number of ranks, and why."""
    model = recipe.model
    if model.has_dropout:
        yield (
            "dropout (model.residual_dropout, model.attention_dropout): ranks draw different masks, so losses differ "
            "between numbers of ranks and sizes of micro-batches"
        )
    if model.moe is not None and model.moe.load_balancing == "aux":
        yield (
            "model.moe.load_balancing=aux: the balance loss is computed for each micro-batch, so losses differ between "
            "sizes of micro-batches. Without train.micro_batch_tokens the number of ranks sets that size"
        )
