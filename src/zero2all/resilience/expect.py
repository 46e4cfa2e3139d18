"""What failures cost on paper: the best time between two checkpoints and the goodput to expect, and a simulation of it.

Young's formula (https://doi.org/10.1145/361147.361115) is sqrt(2 * stall * mean time between failures); Daly's
(https://doi.org/10.1016/j.future.2004.11.016) is exact for failures that come at any moment alike: with T between
checkpoints, stall C, recovery R and mean time between failures M, T takes M * e^(R/M) * (e^((T+C)/M) - 1).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

DAY = 86400.0


# Interruptions of a card in a day. The second is from https://arxiv.org/abs/2407.21783.
RATES = {"0.27 % a card and day": 0.0027, "466 in 54 days on 16,384": 466 / 54 / 16384}
SIZES = (1024, 16384)


@dataclass(frozen=True)
class Job:
    """Seconds: between failures of the whole job, of one checkpoint, from a failure to the first step after it."""

    between: float
    stall: float
    recovery: float

    @property
    def young(self) -> float:
        return math.sqrt(2 * self.stall * self.between)

    @property
    def daly(self) -> float:
        """The interval at which Daly's expected time is shortest, to second order; never more than M itself."""
        if self.stall >= 2 * self.between:
            return self.between
        root = math.sqrt(self.stall / (2 * self.between))
        return math.sqrt(2 * self.stall * self.between) * (1 + root / 3 + root * root / 9) - self.stall

    def goodput(self, every: float) -> float:
        """Share of the time that moves training forward, in the long run, with a checkpoint every so many seconds."""
        each = self.between * math.exp(self.recovery / self.between) * math.expm1((every + self.stall) / self.between)
        return every / each


def simulate(job: Job, every: float, hours: float, seed: int) -> float:
    """The same by events: work, stalls, failures at random moments (also while recovering), work done again."""
    rng = random.Random(seed)
    now = forward = 0.0
    while now < hours * 3600.0:
        fails = now + rng.expovariate(1 / job.between)
        forward += (fails - now) // (every + job.stall) * every  # what came after the last checkpoint is lost
        now = fails
        while (again := rng.expovariate(1 / job.between)) < job.recovery:
            now += again  # a failure during recovery begins it anew
        now += job.recovery
    return forward / now


def table(stall: float, recovery: float, simulated_hours: float = 20000.0, seed: int = 0) -> list[dict[str, Any]]:
    """For each published rate and size: the best interval and the goodput, by formula and by simulation."""
    rows = []
    for rate, per_card_day in RATES.items():
        for cards in SIZES:
            job = Job(DAY / (per_card_day * cards), stall, recovery)
            rows.append(
                {
                    "rate": rate,
                    "cards": cards,
                    "between_failures": job.between,
                    "young": job.young,
                    "daly": job.daly,
                    "goodput": job.goodput(job.daly),
                    "simulated": simulate(job, job.daly, simulated_hours, seed),
                }
            )
    return rows


def markdown(rows: list[dict[str, Any]], stall: float, recovery: float) -> str:
    lines = [
        f"Stall of a checkpoint {stall:g} s, from a failure to the first step after it {recovery:g} s.",
        "",
        "| interruptions | GPUs | between two | best interval (Young) | (Daly) | goodput (formula) | (simulation) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['rate']} | {row['cards']:,} | {row['between_failures'] / 60:.1f} min | {row['young']:.1f} s "
            f"| {row['daly']:.1f} s | {100 * row['goodput']:.3f} % | {100 * row['simulated']:.3f} % |"
        )
    return "\n".join(lines)
