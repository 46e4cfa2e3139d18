"""The pictures of a plan as SVG: memory bars, the pipeline, the roofline."""

from __future__ import annotations

from zero2all.base.charts.plot import Curve, Plot, colour, tint
from zero2all.base.charts.svg import Bar, GanttSpan, bar_svg, gantt_svg, line_svg
from zero2all.base.units import show_bytes
from zero2all.planner.pipeline import Timeline
from zero2all.planner.plan import CostPlan
from zero2all.planner.plan_text import ridge_intensity

BACKWARD = 2
FILLS = {
    "forward": colour(0), "backward": colour(BACKWARD), "input gradient": colour(BACKWARD),
    "weight gradient": tint(BACKWARD, 0.4),
}  # fmt: skip
ROOF = 8  # the grey of the palette
MAX_SPANS = 4000  # passes that are drawn: more would be thinner than a pixel


def plan_svgs(plan: CostPlan, timeline: Timeline | None) -> dict[str, str]:
    """File name -> picture."""
    pictures = {"memory.svg": memory_svg(plan), "roofline.svg": roofline_svg(plan)}
    return pictures if timeline is None else {**pictures, "pipeline.svg": pipeline_svg(timeline, plan.step.bubble)}


def memory_svg(plan: CostPlan) -> str:
    limit = plan.cluster.gpu.memory
    bars = [
        Bar(part.name, part.bytes, show_bytes(part.bytes), note=part.note)
        for part in plan.memory.parts
        if part.bytes > 0
    ]
    title = f"Memory of a rank: {show_bytes(plan.memory.total)} of {show_bytes(limit)} ({plan.cluster.gpu.name})"
    return bar_svg(title, bars, limit=limit)


def pipeline_svg(timeline: Timeline, bubble: float) -> str:
    spans = [
        GanttSpan(
            one.rank,
            one.start,
            one.end,
            FILLS[one.done.action],
            f"{one.done.action}, stage {one.done.stage}, micro-batch {one.done.micro_batch}",
        )
        for one in timeline.passes[:MAX_SPANS]
    ]
    title = f"Pipeline: the bubble is {bubble:.1%} of the busy time (blue forward, green backward)"
    return gantt_svg(title, [f"rank {rank}" for rank in range(timeline.ranks)], spans)


def roofline_svg(plan: CostPlan) -> str:
    """TFLOP/s over FLOPs per byte, both logarithmic; a part is where its work and its time put it."""
    gpu, ridge = plan.cluster.gpu, ridge_intensity(plan)
    parts = [part for part in plan.step.parts if part.flops]
    end = max(1e4, *(part.intensity for part in parts))
    start = min(1.0, *(part.intensity for part in parts))
    corners = [(start, start * gpu.memory_bandwidth), (ridge, gpu.flops), (end, gpu.flops)]
    curves = [Curve(gpu.name, [(x, rate / 1e12) for x, rate in corners], colour=ROOF)]
    for number, part in enumerate(parts):
        point = (part.intensity, part.flops / part.seconds / 1e12)
        curves.append(Curve(f"{part.name}: {part.intensity:,.0f} FLOPs per byte", [], [point], colour=number))
    title = f"Roofline of {gpu.name}: it bends at {ridge:.0f} FLOPs per byte"
    return line_svg(Plot(title, "FLOPs for each byte of memory traffic", "TFLOP/s", curves, log_x=True, log_y=True))
