"""``z2a plan --gpus 8,64,512``: the same recipe on more and more GPUs, with the same global batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zero2all.base.charts.plot import Curve, Plot
from zero2all.base.charts.terminal import bar_text
from zero2all.base.errors import UsageError
from zero2all.base.units import show_bytes, show_seconds
from zero2all.planner.plan import CostPlan
from zero2all.track.step_text import show_rate

BAR = 20  # characters


@dataclass(frozen=True)
class ScalingRow:
    """A number of GPUs, and what the plan says of it."""

    gpus: int
    problem: str = ""
    """Why the recipe cannot run on that many, and the rest is 0."""
    fits: bool = False
    memory: int = 0
    """Bytes of a rank."""
    step: float = 0.0
    """Seconds."""
    tokens_per_second: float = 0.0
    mfu: float = 0.0
    hours: float = 0.0
    """The duration of the run."""
    efficiency: float = 0.0
    """Tokens per second and GPU, relative to the fewest GPUs."""


def scaling_rows(plans: Iterable[tuple[int, CostPlan | UsageError]]) -> list[ScalingRow]:
    rows: list[ScalingRow] = []
    base = None
    for gpus, plan in plans:
        if isinstance(plan, UsageError):
            rows.append(ScalingRow(gpus, str(plan)))
            continue
        speed = plan.speed
        base = base or speed.tokens_per_second / gpus
        rows.append(
            ScalingRow(
                gpus=gpus,
                fits=plan.fits,
                memory=plan.memory.total,
                step=plan.step.expected,
                tokens_per_second=speed.tokens_per_second,
                mfu=speed.mfu,
                hours=plan.run.hours,
                efficiency=speed.tokens_per_second / gpus / base,
            )
        )
    return rows


def scaling_text(rows: Sequence[ScalingRow], limit: int) -> str:
    lines = ["  GPUs   memory       step   speed             MFU      run  per GPU, relative to the first"]
    for row in rows:
        if row.problem:
            lines.append(f"{row.gpus:>6}  {row.problem}")
            continue
        mark = "" if row.fits else f" (more than {show_bytes(limit)})"
        lines.append(
            f"{row.gpus:>6}{show_bytes(row.memory):>9}{row.step:>9.3g} s   {show_rate(row.tokens_per_second):<14}"
            f"{row.mfu:>7.1%}{show_seconds(row.hours * 3600):>9}  "
            f"{bar_text(row.efficiency, BAR)} {row.efficiency:.0%}{mark}"
        )
    return "\n".join(lines)


def scaling_plot(rows: Sequence[ScalingRow]) -> Plot:
    """Planned speed, and what it would be if every GPU were as fast as on the fewest."""
    good = [row for row in rows if not row.problem]
    first = good[0].tokens_per_second / good[0].gpus
    curves = [
        Curve("planned", [(float(row.gpus), row.tokens_per_second) for row in good]),
        Curve("linear", [(float(row.gpus), first * row.gpus) for row in good], colour=8),
    ]
    return Plot("scaling at the same global batch", "GPUs", "tokens per second", curves, log_x=True, log_y=True)
