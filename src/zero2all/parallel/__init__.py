"""The device mesh, and how a model is parallelized over it. The model's own code knows nothing of it."""

from zero2all.parallel.mesh import ParallelDims, ParallelMesh
from zero2all.parallel.parallel_model import ParallelModel

__all__ = ["ParallelDims", "ParallelMesh", "ParallelModel"]
