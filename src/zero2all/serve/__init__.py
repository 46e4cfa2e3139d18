"""Talk to a model."""

from zero2all.serve.chat import ChatSession

__all__ = ["ChatSession"]
