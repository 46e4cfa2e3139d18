"""The device mesh, and how a model is laid on it. The model's own code knows nothing of it."""

from zero2all.parallel.layout import Layout, Sizes
from zero2all.parallel.spread import Spread

__all__ = ["Layout", "Sizes", "Spread"]
