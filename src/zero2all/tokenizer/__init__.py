"""Documents to a vocabulary, and the encoder that never takes text for a special token."""

from zero2all.tokenizer.engines import Ids
from zero2all.tokenizer.tokenizer import Tokenizer
from zero2all.tokenizer.train import train_tokenizer

__all__ = ["Ids", "Tokenizer", "train_tokenizer"]
