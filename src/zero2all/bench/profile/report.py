"""The result of ``z2a bench profile``, as a record and as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from zero2all.base.charts.terminal import bar_text
from zero2all.base.findings import Finding
from zero2all.base.units import show_bytes
from zero2all.bench.profile.memory import MemoryPeak
from zero2all.bench.profile.operators import Operator
from zero2all.recipe import Recipe
from zero2all.train.step_timer import PARTS, Part, StepTime

SHOWN_OPERATORS = 10
SHOWN_RANKS = 16

MAX_SUGGESTIONS = 3
SLOW_RANK = 1.15  # times the work of the median of the others


@dataclass(frozen=True)
class RankTimes:
    """Mean seconds of each part of a step, by rank."""

    ranks: list[StepTime]

    @property
    def seconds(self) -> float:
        """The duration of a step; ranks wait for each other, so all have about the same."""
        return sum(times.seconds for times in self.ranks) / len(self.ranks)

    def share(self, part: Part) -> float:
        """The share of ``part`` in the step, over all ranks."""
        return sum(times.parts[part] for times in self.ranks) / len(self.ranks) / self.seconds


def mean_time(times: Sequence[StepTime]) -> StepTime:
    parts = {part: sum(each.parts[part] for each in times) / len(times) for part in PARTS}
    return StepTime(sum(parts.values()), parts)


def suggest(times: RankTimes, recipe: Recipe) -> list[Finding]:
    """At most three suggestions, the most important first; none if no part stands out."""
    return [*_one_rank(times, recipe), *_parts(times, recipe)][:MAX_SUGGESTIONS]


def slow_rank(times: RankTimes) -> int | None:
    """The rank that the others wait for: its own work takes longer than theirs."""
    if len(times.ranks) < 2:
        return None
    work = [each.seconds - each.parts["communication"] for each in times.ranks]
    slowest = max(range(len(work)), key=work.__getitem__)
    others = median(work[:slowest] + work[slowest + 1 :])
    return slowest if work[slowest] > SLOW_RANK * others else None


def _one_rank(times: RankTimes, recipe: Recipe) -> Iterator[Finding]:
    rank = slow_rank(times)
    if rank is None or recipe.parallel.pp > 1:  # stages of a pipeline differ by design
        return
    own, others = times.ranks[rank], mean_time([each for at, each in enumerate(times.ranks) if at != rank])
    parts = [part for part in PARTS if part != "communication"]
    part = max(parts, key=lambda part: own.parts[part] - others.parts[part])
    yield Finding(
        "note",
        f"rank {rank}",
        f"slow, and the others wait for it: {part} takes {1000 * own.parts[part]:.1f} ms there and "
        f"{1000 * others.parts[part]:.1f} ms elsewhere",
        "check that machine with 'z2a doctor', and what else runs on it",
    )


PARTS_THAT_STAND_OUT: dict[Part, tuple[float, str, str]] = {
    "data": (0.05, "waiting for data: the loader is slower than the model",
             "put the tokens on a local disk (tokens.dir), and check that other programs leave it a core"),
    "communication": (0.2, "exposed communication", ""),
    "optimizer": (0.2, "the optimizer, for a batch of any size", "a larger train.batch_tokens makes it rarer"),
    "logging": (0.05, "logging", "raise track.log_every and track.layer_norms_every"),
    "loss": (0.3, "output head and loss: the vocabulary is large for this model",
             "a smaller tokenizer.vocab_size, or more layers"),
    "other": (0.15, "in no named part: steps are too short for the host",
              "use larger micro-batches (train.micro_batch_tokens) or train.compile=true, and look at trace.json"),
}  # fmt: skip
"""The share of a step from which on they do, why, and what to do."""


def _parts(times: RankTimes, recipe: Recipe) -> Iterator[Finding]:
    for part, (limit, why, remedy) in PARTS_THAT_STAND_OUT.items():
        if part == "communication" and slow_rank(times) is not None:  # who waits for it need not change the layout
            continue
        if (share := times.share(part)) >= limit:
            yield Finding("note", part, f"{share:.0%} of the step is {why}", remedy or _layout_remedy(times, recipe))


def _layout_remedy(times: RankTimes, recipe: Recipe) -> str:
    parallel = recipe.parallel
    if parallel.pp > 1:
        return "most of it is the bubble of the pipeline: use more micro-batches (train.micro_batch_tokens)"
    if parallel.tp > 1:
        return "keep the ranks of parallel.tp inside a node, or lower parallel.tp in favour of FSDP"
    if parallel.dp_replicate == len(times.ranks):
        return "gradients are all-reduced once per step: a larger train.batch_tokens makes that rarer"
    if parallel.reshard_after_forward != "never":
        return "try parallel.reshard_after_forward=never, which gathers weights once, if memory allows"
    return "try larger micro-batches (train.micro_batch_tokens), or parallel.zero=1"


@dataclass(frozen=True)
class Profile:
    """A profile of the steps of a recipe; files are in ``directory``."""

    directory: str
    steps: int
    """The number of steps that were timed, without the profiler."""
    step_seconds: float
    shares: dict[str, float]
    """The share of each part in the step, over all ranks."""
    ranks: list[StepTime]
    """Mean of the steps on every rank."""
    tokens_per_second: float
    flops: float
    """FLOPs of rank 0 in one step, as torch counts them."""
    flops_share: float
    """FLOPs per second, of the peak of a device."""
    peak: str
    """What that peak is."""
    operators: list[Operator]
    """The operators of rank 0, the slowest first."""
    memory: MemoryPeak
    """The peak on rank 0."""
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
