"""Bad data in a token store, shared by the test and the benchmark of the spike guard."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zero2all.recipe import Recipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenStore
from zero2all.train.plan import Plan


def poison(recipe: Recipe, garbage: Sequence[int], newlines: Sequence[int]) -> None:
    """Put random bytes where some steps of the recipe read, and nothing but newlines where others do."""
    plan, rng = Plan(recipe, TokenStore(recipe.tokens_dir, "train")), np.random.default_rng(0)
    [newline] = Tokenizer(recipe.tokenizer_dir).encode("\n")
    for step in (*garbage, *newlines):
        samples = plan.at(step).samples
        sources, rows = samples.order.locate(*plan.at(step).batch(step))
        for source, row in zip(sources, rows, strict=True):
            shard, first, last = samples._rows[samples.order.names[source]].place(int(row))
            stored = np.memmap(shard.stem.with_suffix(".bin"), dtype=shard.tokens.dtype, mode="r+")
            inside = slice(first + 1, last - 1)  # the ends are tokens of the neighbours too
            stored[inside] = rng.integers(0, 256, last - first - 2) if step in garbage else newline
            stored.flush()
