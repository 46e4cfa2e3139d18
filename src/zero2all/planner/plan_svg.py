"""The pictures of a plan as SVG: memory bars, the pipeline, the roofline."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from zero2all.planner.pipeline import Timeline
from zero2all.planner.plan import Plan
from zero2all.planner.plan_text import ridge_intensity
from zero2all.units import show_bytes

WIDTH = 900
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
ACTION_COLOURS = {
    "forward": "#4269d0", "backward": "#3ca951", "input gradient": "#3ca951", "weight gradient": "#b3dbb9",
}  # fmt: skip
MAX_CELLS = 4000  # passes that are drawn: more would be thinner than a pixel


def plan_svgs(plan: Plan, timeline: Timeline | None) -> dict[str, str]:
    """File name -> picture."""
    pictures = {"memory.svg": memory_svg(plan), "roofline.svg": roofline_svg(plan)}
    return pictures if timeline is None else {**pictures, "pipeline.svg": pipeline_svg(timeline, plan.step.bubble)}


def _svg(height: int, title: str, parts: Iterator[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12"><rect width="{WIDTH}" height="{height}" fill="#fff"/>'
        f"{_text(20, 24, title, size=15)}{''.join(parts)}</svg>\n"
    )


def _text(x: float, y: float, words: str, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}">{inside}</rect>'


def memory_svg(plan: Plan) -> str:
    limit, parts = plan.cluster.gpu.memory, [part for part in plan.memory.parts if part.bytes > 0]
    scale = 420 / max(limit, *(part.bytes for part in parts))

    def draw() -> Iterator[str]:
        for row, part in enumerate(parts):
            y, width = 44 + 22 * row, part.bytes * scale
            yield _text(300, y + 12, part.name, anchor="end")
            yield _box(310, y, width, 16, COLOURS[row % len(COLOURS)], part.note)
            yield _text(316 + width, y + 12, show_bytes(part.bytes))
        at, end = 310 + limit * scale, 44 + 22 * len(parts)
        yield f'<path d="M{at:.1f} 38V{end}" stroke="#c00" stroke-dasharray="4"/>'

    title = f"Memory of a rank: {show_bytes(plan.memory.total)} of {show_bytes(limit)} ({plan.cluster.gpu.name})"
    return _svg(60 + 22 * len(parts), title, draw())


def pipeline_svg(timeline: Timeline, bubble: float) -> str:
    cell = (WIDTH - 100) / timeline.length

    def draw() -> Iterator[str]:
        for rank in range(timeline.ranks):
            yield _text(20, 58 + 24 * rank, f"rank {rank}")
        for one in timeline.passes[:MAX_CELLS]:
            x, y = 80 + one.start * cell, 44 + 24 * one.rank
            title = f"{one.done.action}, stage {one.done.stage}, micro-batch {one.done.micro_batch}"
            yield _box(x, y, max((one.end - one.start) * cell - 0.5, 0.2), 20, ACTION_COLOURS[one.done.action], title)

    title = f"Pipeline: the bubble is {bubble:.1%} of the busy time (blue forward, green backward)"
    return _svg(60 + 24 * timeline.ranks, title, draw())


def roofline_svg(plan: Plan) -> str:
    """FLOP/s over FLOPs a byte, both logarithmic; a part is where its work and its time put it."""
    gpu, ridge, height = plan.cluster.gpu, ridge_intensity(plan), 420
    parts = [part for part in plan.step.parts if part.flops]
    low_x, high_x, top = 0.0, math.log10(max(1e4, *(part.intensity for part in parts))), math.log10(gpu.flops)
    bottom = min(math.log10(gpu.memory_bandwidth), *(math.log10(part.flops / part.seconds) for part in parts)) - 0.2

    def x(intensity: float) -> float:
        return 70 + (WIDTH - 330) * (math.log10(intensity) - low_x) / (high_x - low_x)

    def y(rate: float) -> float:
        return 50 + (height - 100) * (top - math.log10(rate)) / (top - bottom)

    def draw() -> Iterator[str]:
        points = [(1.0, gpu.memory_bandwidth), (ridge, gpu.flops), (10**high_x, gpu.flops)]
        path = " ".join(f"{x(intensity):.1f},{y(rate):.1f}" for intensity, rate in points)
        yield f'<polyline points="{path}" fill="none" stroke="#333" stroke-width="2"/>'
        for row, part in enumerate(parts):
            colour = COLOURS[row % len(COLOURS)]
            at_x, at_y = x(part.intensity), y(part.flops / part.seconds)
            yield f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="6" fill="{colour}"/>'
            yield _box(WIDTH - 240, 60 + 20 * row, 12, 12, colour)
            yield _text(WIDTH - 222, 71 + 20 * row, f"{part.name}: {part.intensity:,.0f}")
        for power in range(int(high_x) + 1):
            yield _text(x(10**power), height - 24, f"{10**power:,}", anchor="middle")
        yield _text(x(10 ** (high_x / 2)), height - 6, "FLOPs for each byte of memory traffic", anchor="middle")
        yield _text(74, 44, f"{gpu.flops / 1e12:,.0f} TFLOP/s")

    return _svg(height, f"Roofline of {gpu.name}: it bends at {ridge:.0f} FLOPs a byte", draw())
