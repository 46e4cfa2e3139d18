"""Let a trained model speak: a checking tool, not a serving engine."""

from zero2all.serve.generate import generate

__all__ = ["generate"]
