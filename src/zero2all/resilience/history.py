"""Whether a job that failed is worth another try, and whether one node alone is to blame."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from torch.distributed.elastic.rendezvous import RendezvousError

from zero2all.resilience.exits import Kind

TRIES = 3  # failures at one step before the job is given up
FRUITLESS = 10  # failures in a row without getting further than before, wherever
LONGEST_PAUSE = 60.0


class Elsewhere(Protocol):
    """What an agent asks the rendezvous about the other nodes."""

    def stand_without_us(self, step: int) -> tuple[int, bool]: ...


def leaves_alone(rendezvous: Elsewhere, kind: Kind, step: int, nodes: int) -> bool:
    """Tell of a failure that began on this node; whether, if it is given up, only this node need go."""
    if nodes == 1 or kind not in ("crash", "out of memory", "wrong usage"):
        return False
    try:
        left, elsewhere = rendezvous.stand_without_us(step)
    except RendezvousError:
        return False  # the rendezvous is lost; that is noticed elsewhere
    return left > 0 and not elsewhere


class History:
    """How often the job failed where."""

    def __init__(self) -> None:
        self._at: Counter[int] = Counter()
        self._fruitless = 0
        self._furthest = -1

    def reached(self, step: int) -> None:
        """Getting further than ever makes up for failures before."""
        if step > self._furthest:
            self._furthest, self._fruitless = step, 0
            self._at.clear()

    def give_up(self, kind: Kind, step: int, nodes: int | None, restarts_left: int) -> str | None:
        """Count a failure; why there is no use in another try, if there is none."""
        if kind == "wrong usage":
            return "not tried again: it would be the same"
        if kind == "stopped":
            # Of several nodes another one may be leaving; those that stay go on.
            return None if (nodes or 1) > 1 else "stopped: the same command goes on from there"
        if kind != "cut off" or (nodes or 1) == 1:  # otherwise another node failed at this step, not this one
            self._at[step] += 1
        self._fruitless += 1
        where = f"after step {step}" if step >= 0 else "before the first step"
        if self._at[step] >= TRIES:
            return f"given up: it failed {TRIES} times {where}, so another try would too"
        if self._fruitless >= FRUITLESS:
            return f"given up: {FRUITLESS} failures in a row without getting past step {self._furthest}"
        return None if restarts_left else f"given up {where}: no restarts are left (--restarts)"

    def pause(self) -> float:
        """Seconds before the next try: none at first, then more and more while the job gets no further."""
        return 0.0 if self._fruitless < 2 else min(LONGEST_PAUSE, 2.0 ** (self._fruitless - 1))
