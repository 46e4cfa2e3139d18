"""What the machine at hand can do: matrix products around a shape, and each fused op's share of a training step."""

from zero2all.bench.ops import bench_ops, ops_markdown, shape_for_this_machine
from zero2all.bench.report import write_report
from zero2all.bench.shapes import bench_shapes, shapes_markdown

__all__ = ["bench_ops", "bench_shapes", "ops_markdown", "shape_for_this_machine", "shapes_markdown", "write_report"]
