"""What the machine at hand can do: matrix products around a shape, and each fused op's share of a training step."""

from zero2all.bench.measurements import write_report
from zero2all.bench.ops import bench_ops, default_preset, ops_markdown
from zero2all.bench.shapes import bench_shapes, shapes_markdown

__all__ = ["bench_ops", "bench_shapes", "default_preset", "ops_markdown", "shapes_markdown", "write_report"]
