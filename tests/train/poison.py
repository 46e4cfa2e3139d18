"""Bad data in a token store, for the test and the benchmark of the spike guard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from zero2all.base.io import MANIFEST, read_json, sha256_file, write_json
from zero2all.recipe import Recipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenStore
from zero2all.tokens.build_store import shard_checksums
from zero2all.train.plan import Plan


def poison(recipe: Recipe, garbage: Sequence[int], newlines: Sequence[int]) -> None:
    """Put random bytes where some steps of the recipe read, and nothing but newlines where others do."""
    plan, rng = Plan(recipe, TokenStore(recipe.tokens_dir, "train")), np.random.default_rng(0)
    [newline] = Tokenizer(recipe.tokenizer_dir).encode("\n")
    for step in (*garbage, *newlines):
        dataset = plan.stage_of(step).dataset
        sources, sequences = dataset.order.locate(*plan.stage_of(step).sample_range(step))
        for source, sequence in zip(sources, sequences, strict=True):
            shard, first, last = dataset._sequences[dataset.order.names[source]].token_range(int(sequence))
            stored = np.memmap(shard.stem.with_suffix(".bin"), dtype=shard.tokens.dtype, mode="r+")
            inside = slice(first + 1, last - 1)  # the ends belong to neighbouring sequences too
            stored[inside] = rng.integers(0, 256, last - first - 2) if step in garbage else newline
            stored.flush()
    _update_checksums(recipe.tokens_dir)


def _update_checksums(tokens: Path) -> None:
    """Bad text has valid checksums; otherwise it would be a damaged store."""
    manifest = read_json(tokens / MANIFEST)
    for entry in manifest["splits"]["train"].values():
        for number, shard in enumerate(entry["shards"]):
            path = tokens / "train" / f"{shard}.json"
            write_json(path, read_json(path) | asdict(shard_checksums(path.with_suffix(""))))
            entry["records"][number] = sha256_file(path)
    write_json(tokens / MANIFEST, manifest)
