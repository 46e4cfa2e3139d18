"""The result of ``z2a profile``, as a record and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zero2all.charts.terminal import bar_text
from zero2all.findings import Finding
from zero2all.profiling.advice import RankTimes
from zero2all.profiling.memory import MemoryPeak
from zero2all.profiling.operators import Operator
from zero2all.train.step_timer import PARTS, StepTime
from zero2all.units import show_bytes

SHOWN_OPERATORS = 10
SHOWN_RANKS = 16


@dataclass(frozen=True)
class Profile:
    """Of the steps of a recipe; files are in ``directory``."""

    directory: str
    steps: int
    """That were timed, without the profiler."""
    step_seconds: float
    shares: dict[str, float]
    """Of each part in the step, over all ranks."""
    ranks: list[StepTime]
    """Mean of the steps on every rank."""
    tokens_per_second: float
    flops: float
    """Of rank 0 in one step, as torch counts them."""
    flops_share: float
    """FLOPs per second, of the peak of a device."""
    peak: str
    """What that peak is."""
    operators: list[Operator]
    """Of rank 0, the slowest first."""
    memory: MemoryPeak
    """Of rank 0."""
    suggestions: list[Finding]
    trace: str


def format_profile(profile: Profile) -> str:
    return "\n".join([*_times(profile), "", *_operators(profile), "", *_memory(profile), "", *_suggestions(profile)])


def _times(profile: Profile) -> Iterator[str]:
    count = len(profile.ranks)
    yield (
        f"a step takes {1000 * profile.step_seconds:.1f} ms (mean of {profile.steps}, {count} "
        f"{'rank' if count == 1 else 'ranks'}): {profile.tokens_per_second:,.0f} tokens per second, "
        f"{profile.flops / 1e9:.1f} GFLOPs a device = {profile.flops_share:.1%} of its peak ({profile.peak})"
    )
    for part in PARTS:
        share = profile.shares[part]
        yield f"  {part:14} {share:6.1%}  {bar_text(share, 40)}".rstrip()
    if count > 1:
        yield ""
        yield "ms by rank" + "".join(f"{name:>14}" for name in ("step", *PARTS))
        for rank in shown_ranks(profile):
            times = profile.ranks[rank]
            columns = (times.seconds, *(times.parts[part] for part in PARTS))
            yield f"rank {rank:<5}" + "".join(f"{1000 * seconds:14.1f}" for seconds in columns)
        if count > SHOWN_RANKS:
            yield f"the {SHOWN_RANKS} ranks with the most work of their own; profile.json has all {count}"


def shown_ranks(profile: Profile) -> list[int]:
    """The ranks with the most work of their own, in order."""
    times = RankTimes(profile.ranks).ranks
    by_work = sorted(range(len(times)), key=lambda rank: times[rank].parts["communication"] - times[rank].seconds)
    return sorted(by_work[:SHOWN_RANKS])


def _operators(profile: Profile) -> Iterator[str]:
    yield f"{'operator (rank 0)':56} {'calls':>7} {'ms':>9} {'share':>7} {'GFLOPs':>9} {'of peak':>8}"
    for row in profile.operators[:SHOWN_OPERATORS]:
        flops = f"{row.flops / 1e9:9.2f}" if row.flops else f"{'':9}"
        share = f"{row.peak_share:8.1%}" if row.peak_share is not None else ""
        yield (
            f"{row.name[:56]:56} {row.calls:7.0f} {1000 * row.seconds:9.2f} {row.share:7.1%} {flops} {share}".rstrip()
        )


def _memory(profile: Profile) -> Iterator[str]:
    peak = profile.memory
    yield f"peak memory of tensors (rank 0): {show_bytes(peak.total)}, in {peak.part}"
    named = {
        "parameters": peak.parameters,
        "gathered weights": peak.gathered,
        "gradients": peak.gradients,
        "optimizer state": peak.optimizer,
        "activations": peak.activations,
        "other": peak.other,
    }
    for name, size in named.items():
        if size:
            yield f"  {name:16} {show_bytes(size):>8} {size / peak.total:6.1%}"


def _suggestions(profile: Profile) -> Iterator[str]:
    if not profile.suggestions:
        compute = profile.shares["forward"] + profile.shares["loss"] + profile.shares["backward"]
        yield f"no part stands out: {compute:.0%} of the step is forward, loss and backward"
    yield from map(str, profile.suggestions)
    yield f"trace, operators and memory timeline: {profile.directory}"
