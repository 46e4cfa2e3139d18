"""Whether the vocabulary of a recipe's model fits its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

from zero2all.base.errors import Z2aError
from zero2all.recipe import Mistake, Recipe
from zero2all.tokenizer.hf_directory import TOKENIZER_FILES
from zero2all.tokenizer.tokenizer import Tokenizer


def vocabulary_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """A tokenizer that exists may have more tokens than the model has rows. The rules of a recipe cannot see that."""
    size = recipe.model.vocab_size
    tokens, name = _tokenizer_size(recipe)
    if size is not None and tokens is not None and tokens > size and name != "tokenizer.vocab_size":
        yield Mistake(
            f"model.vocab_size ({size}) is smaller than {name} ({tokens}): set model.vocab_size={tokens}, or null",
            ("model.vocab_size", "tokenizer.dir"),
        )


def vocabulary_remark(recipe: Recipe) -> str | None:
    """A model with more rows than tokens is valid, but most often a preset whose tokenizer is a different one."""
    size = recipe.model.vocab_size
    tokens, name = _tokenizer_size(recipe)
    if size is None or tokens is None or tokens >= size:
        return None
    origin = f" (preset {recipe.model.preset})" if recipe.model.preset is not None else ""
    return (
        f"model.vocab_size is {size}{origin}, but {name} is {tokens}: {size - tokens} rows of the embedding and the "
        f"head are never used. Set model.vocab_size=null to take the tokenizer's size, or train one of {size} tokens"
    )


def _tokenizer_size(recipe: Recipe) -> tuple[int | None, str]:
    """The vocabulary size of the tokenizer that exists, or of the one that will be trained; None if unknown."""
    directory = recipe.tokenizer_dir
    if (directory / TOKENIZER_FILES[0]).exists():
        try:
            return Tokenizer(directory).vocab_size, f"the vocabulary in {directory}"
        except Z2aError:
            return None, ""  # damaged, which reading it will say
    return (recipe.tokenizer.vocab_size, "tokenizer.vocab_size") if recipe.tokenizer.dir is None else (None, "")
