"""What the machine at hand can do: matrix products around a shape, and each fused op's share of a training step."""

from zero2all.bench.ops import bench_ops
from zero2all.bench.shapes import bench_shapes

__all__ = ["bench_ops", "bench_shapes"]
