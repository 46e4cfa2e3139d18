"""The optimal checkpoint interval and the expected goodput under failures.

Young's formula (https://doi.org/10.1145/361147.361115) is sqrt(2 * stall * mean time between failures); Daly's
(https://doi.org/10.1016/j.future.2004.11.016) is exact for exponentially distributed failures: with T between
checkpoints, stall C, recovery R and mean time between failures M, T takes M * e^(R/M) * (e^((T+C)/M) - 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DAY = 86400.0


# Failures per GPU and day. The second is from https://arxiv.org/abs/2407.21783.
FAILURE_RATES = {"0.27% a card and day": 0.0027, "466 in 54 days on 16,384": 466 / 54 / 16384}


@dataclass(frozen=True)
class FailureModel:
    """Seconds: between failures of the job, of stall per checkpoint, from a failure to the next step."""

    mtbf: float
    stall: float
    recovery: float

    @property
    def young_interval(self) -> float:
        return math.sqrt(2 * self.stall * self.mtbf)

    @property
    def daly_interval(self) -> float:
        """The interval at which Daly's expected time is shortest, to second order; never more than M itself."""
        if self.stall >= 2 * self.mtbf:
            return self.mtbf
        root = math.sqrt(self.stall / (2 * self.mtbf))
        return math.sqrt(2 * self.stall * self.mtbf) * (1 + root / 3 + root * root / 9) - self.stall

    def goodput(self, interval: float) -> float:
        """Expected share of time that advances training, with a checkpoint every ``interval`` seconds."""
        expected_time = (
            self.mtbf * math.exp(self.recovery / self.mtbf) * math.expm1((interval + self.stall) / self.mtbf)
        )
        return interval / expected_time
