"""Bad data in a token store, shared by the test and the benchmark of the spike guard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zero2all.io import MANIFEST, read_json, sha256_file, write_json
from zero2all.recipe import Recipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenStore
from zero2all.tokens.build import checksums_of
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
    _record_again(recipe.tokens_dir)


def _record_again(tokens: Path) -> None:
    """Bad text comes with the right checksums; without them it would be a damaged store."""
    manifest = read_json(tokens / MANIFEST)
    for part in manifest["splits"]["train"].values():
        for number, shard in enumerate(part["shards"]):
            path = tokens / "train" / f"{shard}.json"
            write_json(path, read_json(path) | checksums_of(path.with_suffix("")))
            part["records"][number] = sha256_file(path)
    write_json(tokens / MANIFEST, manifest)
