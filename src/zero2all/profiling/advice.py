"""What a profile suggests: one function for each rule, the most important first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from zero2all.recipe import Recipe
from zero2all.train.step_timer import PARTS, Part, StepTime

MAX_SUGGESTIONS = 3
SLOW_RANK = 1.15  # times the work of the median of the others
DATA_SHARE, COMMUNICATION_SHARE, OPTIMIZER_SHARE, LOSS_SHARE, LOGGING_SHARE, OTHER_SHARE = (
    0.05,
    0.2,
    0.2,
    0.3,
    0.05,
    0.15,
)


@dataclass(frozen=True)
class RankTimes:
    """Mean seconds of each part of a step, by rank."""

    ranks: list[StepTime]

    @property
    def seconds(self) -> float:
        """Of a step; ranks wait for each other, so all have about the same."""
        return sum(times.seconds for times in self.ranks) / len(self.ranks)

    def share(self, part: Part) -> float:
        """Of the step, over all ranks."""
        return sum(times.parts[part] for times in self.ranks) / len(self.ranks) / self.seconds


def mean_time(times: Sequence[StepTime]) -> StepTime:
    parts = {part: sum(each.parts[part] for each in times) / len(times) for part in PARTS}
    return StepTime(sum(parts.values()), parts)


def suggest(times: RankTimes, recipe: Recipe) -> list[str]:
    """At most three suggestions; none if no part stands out."""
    found = [text for rule in RULES for text in rule(times, recipe)]
    return found[:MAX_SUGGESTIONS]


def slow_rank(times: RankTimes) -> int | None:
    """The rank that the others wait for: its own work takes longer than theirs."""
    if len(times.ranks) < 2:
        return None
    work = [each.seconds - each.parts["communication"] for each in times.ranks]
    slowest = max(range(len(work)), key=work.__getitem__)
    others = median(work[:slowest] + work[slowest + 1 :])
    return slowest if work[slowest] > SLOW_RANK * others else None


def _one_rank(times: RankTimes, recipe: Recipe) -> Iterator[str]:
    rank = slow_rank(times)
    if rank is None or recipe.parallel.pp > 1:  # stages of a pipeline differ by design
        return
    own, others = times.ranks[rank], mean_time([each for at, each in enumerate(times.ranks) if at != rank])
    parts = [part for part in PARTS if part != "communication"]
    part = max(parts, key=lambda part: own.parts[part] - others.parts[part])
    yield (
        f"rank {rank} is slow, and the others wait for it: {part} takes {1000 * own.parts[part]:.1f} ms there and "
        f"{1000 * others.parts[part]:.1f} ms elsewhere: check that machine with 'z2a doctor', and what else runs on it"
    )


def _data(times: RankTimes, recipe: Recipe) -> Iterator[str]:
    if (share := times.share("data")) >= DATA_SHARE:
        yield (
            f"{share:.0%} of the step is waiting for data: the loader is slower than the model: put the tokens on a "
            "local disk (tokens.dir), and check that other programs leave it a core"
        )


def _communication(times: RankTimes, recipe: Recipe) -> Iterator[str]:
    share, parallel = times.share("communication"), recipe.parallel
    if share < COMMUNICATION_SHARE or slow_rank(times) is not None:  # who waits for a slow rank need not change layout
        return
    begin = f"{share:.0%} of the step is exposed communication: "
    if parallel.pp > 1:
        yield begin + "most of it is the bubble of the pipeline: use more micro-batches (train.micro_batch_tokens)"
    elif parallel.tp > 1:
        yield begin + "keep the ranks of parallel.tp inside a node, or lower parallel.tp in favour of FSDP"
    elif parallel.dp_replicate == len(times.ranks):
        yield begin + "gradients are all-reduced once a step: a larger train.batch_tokens makes that rarer"
    elif parallel.reshard_after_forward != "never":
        yield begin + "try parallel.reshard_after_forward=never, which gathers weights once, if memory allows"
    else:
        yield begin + "try larger micro-batches (train.micro_batch_tokens), or parallel.gradient_sync=last"


def _optimizer(times: RankTimes, recipe: Recipe) -> Iterator[str]:
    if (share := times.share("optimizer")) >= OPTIMIZER_SHARE:
        yield (
            f"{share:.0%} of the step is the optimizer ({recipe.train.optimizer.name}): its cost does not depend on "
            "the batch, so a larger train.batch_tokens makes it rarer"
        )


def _loss(times: RankTimes, recipe: Recipe) -> Iterator[str]:
    if (share := times.share("loss")) >= LOSS_SHARE:
        yield (
            f"{share:.0%} of the step is output head and loss: the vocabulary is large for this model: a smaller "
            "tokenizer.vocab_size, or more layers"
        )


def _logging(times: RankTimes, recipe: Recipe) -> Iterator[str]:
    if (share := times.share("logging")) >= LOGGING_SHARE:
        yield f"{share:.0%} of the step is logging: raise track.log_every and track.layer_norms_every"


def _other(times: RankTimes, recipe: Recipe) -> Iterator[str]:
    if (share := times.share("other")) >= OTHER_SHARE:
        yield (
            f"{share:.0%} of the step is in no named part: steps are too short for the host: use larger micro-batches "
            "(train.micro_batch_tokens) or train.compile=true, and look at trace.json"
        )


Rule = Callable[[RankTimes, Recipe], Iterator[str]]
RULES: tuple[Rule, ...] = (_one_rank, _data, _communication, _optimizer, _logging, _loss, _other)
