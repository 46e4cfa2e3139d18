"""How good a model is: bits-per-byte on held-out text."""

from zero2all.evals.bits_per_byte import bits_per_byte

__all__ = ["bits_per_byte"]
