"""Tokenizer training, and an encoder that never parses text as a special token."""

from typing import TYPE_CHECKING

from zero2all.tokenizer.backends import Ids
from zero2all.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from zero2all.tokenizer.train import train_tokenizer

__all__ = ["Ids", "Tokenizer", "train_tokenizer"]


def __getattr__(name: str) -> object:
    """Import training when it is used: it imports numba, which takes most of a second and 100 MB."""
    if name == "train_tokenizer":
        from zero2all.tokenizer.train import train_tokenizer

        return train_tokenizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
