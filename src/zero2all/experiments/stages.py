"""Documents, tokenizer and tokens of the variants."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zero2all.base.console import heading, say
from zero2all.base.io import MANIFEST, read_json
from zero2all.base.tasks import TaskEngine, shutdown_workers
from zero2all.base.units import show_count
from zero2all.corpus import build_corpus, recommended_workers, summary_lines
from zero2all.experiments.target import require_validation, validation_sources
from zero2all.recipe import Recipe
from zero2all.tokenizer import train_tokenizer
from zero2all.tokens import TokenStore, build_tokens


def build_missing_stages(recipe: Recipe, target: Mapping[str, float]) -> None:
    """Build the stages that do not exist, and check that there is text to validate with, for every source of a target.

    One that exists is used as it is, as by ``z2a train``: only its own command builds it again.
    """
    if not _is_finished(recipe.tokens_dir):
        _build_stages(recipe)
    valid = TokenStore(recipe.tokens_dir, "valid")
    valid.require_full_sequence(recipe.train.seq_len)
    require_validation(target, validation_sources(valid, recipe.train.seq_len))


def _build_stages(recipe: Recipe) -> None:
    if not _is_finished(recipe.documents_dir):
        heading(f"corpus: raw files to documents in {recipe.documents_dir}")
        engine = TaskEngine(workers=recommended_workers(recipe.corpus))
        for line in summary_lines(build_corpus(recipe.corpus, recipe.documents_dir, engine)):
            say(line)
        shutdown_workers()  # training needs their memory
    if not (recipe.tokenizer_dir / "tokenizer.json").exists():
        heading(f"tokenizer: documents to a vocabulary in {recipe.tokenizer_dir}")
        train_tokenizer(recipe.tokenizer, recipe.documents_dir, recipe.tokenizer_dir)
    heading(f"tokens: documents to a token store in {recipe.tokens_dir}")
    built = build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)
    say(f"{show_count(built.tokens)} tokens")


def _is_finished(directory: Path) -> bool:
    path = directory / MANIFEST
    if not path.exists():
        return False
    manifest = read_json(path)
    return not (isinstance(manifest, dict) and manifest.get("unfinished"))
