"""Optimizers, which of a model's parameters each updates, and the bytes of its state."""
