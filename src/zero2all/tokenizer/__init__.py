"""Tokenizer training, and an encoder that never parses text as a special token."""

from zero2all.tokenizer.backends import Ids
from zero2all.tokenizer.tokenizer import Tokenizer
from zero2all.tokenizer.train import train_tokenizer

__all__ = ["Ids", "Tokenizer", "train_tokenizer"]
