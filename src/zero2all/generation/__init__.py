"""Text generation from a trained model: to check it, not to serve it."""

from zero2all.generation.generate import generate

__all__ = ["generate"]
