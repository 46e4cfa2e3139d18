"""Talk to a model."""

from zero2all.generation.serve.chat import ChatSession

__all__ = ["ChatSession"]
