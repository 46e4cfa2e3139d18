"""Pipeline schedules: the order of passes, simulated, and the share of time that ranks wait in it."""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

from zero2all.parallel.pipeline_parallel import stage_indices_of_rank
from zero2all.recipe import ParallelRecipe
from zero2all.recipe.parallel import SPLIT_BACKWARD_SCHEDULES, PipelineSchedule

Action = Literal["forward", "backward", "input gradient", "weight gradient"]
LENGTH: dict[Action, int] = {"forward": 1, "backward": 2, "input gradient": 1, "weight gradient": 1}
"""In units of a forward pass through one stage."""
STEADY_ROUNDS = {"zbv": 3}  # of pp micro-batches, from which on more of them only add busy time; 1 for others


def bubble_fraction(schedule: PipelineSchedule, pp: int, micro_batches: int, stages_per_rank: int) -> float:
    """Idle time of a rank as a share of its busy time, as in the schedule that ``simulate`` draws.

    With enough micro-batches (pp - 1) / (stages per rank x micro-batches), of which schedules that split the backward
    fill two thirds with weight gradients (https://arxiv.org/abs/2401.10241). With fewer, it is read from the drawing.

    >>> bubble_fraction("1f1b", pp=4, micro_batches=12, stages_per_rank=1)
    0.25
    """
    if stages_per_rank == 2 and micro_batches < STEADY_ROUNDS.get(schedule, 1) * pp:
        return _drawn_bubble(schedule, pp, micro_batches)
    left = 1 / 3 if schedule in SPLIT_BACKWARD_SCHEDULES else 1.0
    return left * (pp - 1) / (stages_per_rank * micro_batches)


@functools.lru_cache(maxsize=1024)
def _drawn_bubble(schedule: PipelineSchedule, pp: int, micro_batches: int) -> float:
    return simulate(ParallelRecipe(pp=pp, schedule=schedule), micro_batches).bubble


def round_size(schedule: PipelineSchedule, pp: int, micro_batches: int) -> int:
    """Micro-batches that go through one stage of a rank before the next stage has its turn, as torch counts them."""
    return pp if schedule == "zbv" else micro_batches // max(1, micro_batches // pp)


def schedule_runs(schedule: PipelineSchedule, pp: int, micro_batches: int) -> bool:
    """Whether torch accepts this number of micro-batches: interleaved schedules have rounds of equal length.

    >>> schedule_runs("interleaved", pp=2, micro_batches=11), schedule_runs("interleaved", pp=2, micro_batches=12)
    (False, True)
    """
    rounds = max(1, micro_batches // pp)
    return pp == 1 or schedule not in ("interleaved", "zero-bubble") or micro_batches % rounds == 0


class Pass(NamedTuple):
    """What a rank runs at one time."""

    action: Action
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class TimedPass:
    rank: int
    done: Pass
    start: int

    @property
    def end(self) -> int:
        return self.start + LENGTH[self.done.action]


@dataclass(frozen=True)
class Timeline:
    """A step of a pipeline."""

    passes: list[TimedPass]
    ranks: int
    length: int

    @property
    def bubble(self) -> float:
        """Idle time as a share of busy time."""
        busy = sum(LENGTH[one.done.action] for one in self.passes)
        return (self.ranks * self.length - busy) / busy


def simulate(parallel: ParallelRecipe, micro_batches: int) -> Timeline:
    """Every rank runs its forward and backward passes in the order of the schedule, each as soon as what it needs is
    there. Weight gradients of a split backward fill the time in which it would wait."""
    back: Action = "input gradient" if parallel.schedule in SPLIT_BACKWARD_SCHEDULES else "backward"
    queues = [_queues(parallel, rank, micro_batches, back) for rank in range(parallel.pp)]
    later: list[deque[Pass]] = [deque() for _ in queues]  # weight gradients that can be computed at any time
    ends: dict[Pass, int] = {}
    timed: list[TimedPass] = []
    free = [0] * parallel.pp
    last_stage = parallel.pp * parallel.stages_per_rank - 1
    time, left = 0, sum(len(queue) for rank in queues for queue in rank)
    while left or any(later):
        for rank, waiting in enumerate(queues):
            if free[rank] > time:
                continue
            ready = (
                queue
                for queue in waiting
                if queue and all(ends.get(need, time + 1) <= time for need in _needs(queue[0][1], last_stage, back))
            )
            first = min(ready, key=lambda queue: queue[0][0], default=None)
            if first is not None:
                _, chosen = first.popleft()
                left -= 1
                if chosen.action == "input gradient":
                    later[rank].append(chosen._replace(action="weight gradient"))
            elif later[rank]:
                chosen = later[rank].popleft()
            else:
                continue
            timed.append(TimedPass(rank, chosen, time))
            ends[chosen] = free[rank] = timed[-1].end
        time = min((end for end in free if end > time), default=time + 1)
    return Timeline(timed, parallel.pp, max(free))


def _queues(parallel: ParallelRecipe, rank: int, micro_batches: int, back: Action) -> list[deque[tuple[int, Pass]]]:
    """The passes of a rank with their places in its order. Of several queues the first is taken that can run: a rank of
    zbv takes what comes first from either end, so it has one for each pass of a stage, of which no micro-batch can
    overtake another. Others keep their order."""
    queues: dict[object, deque[tuple[int, Pass]]] = {}
    for place, one in enumerate(_pass_order(parallel, rank, micro_batches, back)):
        key = (one.action, one.stage) if parallel.schedule == "zbv" else None
        queues.setdefault(key, deque()).append((place, one))
    return list(queues.values())


def _needs(one: Pass, last_stage: int, back: Action) -> list[Pass]:
    if one.action == "forward":
        return [Pass("forward", one.stage - 1, one.micro_batch)] if one.stage else []
    after = [Pass(back, one.stage + 1, one.micro_batch)] if one.stage < last_stage else []
    return [Pass("forward", one.stage, one.micro_batch), *after]


def _pass_order(parallel: ParallelRecipe, rank: int, micro_batches: int, back: Action) -> list[Pass]:
    """Forward passes until the rank holds as many micro-batches as it may, then one backward and one forward in turn.

    Micro-batches go through the stages of a rank in rounds; backward begins with the last stage.
    """
    pp, stages = parallel.pp, stage_indices_of_rank(parallel, rank)
    size = round_size(parallel.schedule, pp, micro_batches)

    def in_groups(action: Action, order: list[int]) -> list[Pass]:
        return [
            Pass(action, stage, micro_batch)
            for group in range(0, micro_batches, size)
            for stage in order
            for micro_batch in range(group, min(group + size, micro_batches))
        ]

    forward, backward = in_groups("forward", stages), in_groups(back, stages[::-1])
    ahead = len(forward) if parallel.schedule == "gpipe" else pp - rank
    if len(stages) > 1:
        ahead = 2 * (pp - rank - 1) + (len(stages) - 1) * size + 1
    ahead = min(ahead, len(forward))
    turns = [one for pair in zip(backward, forward[ahead:], strict=False) for one in pair]
    return [*forward[:ahead], *turns, *backward[len(forward) - ahead :]]
