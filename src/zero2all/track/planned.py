"""What was planned of a run before its first step, beside what it then measured. The plan is in ``plan.json``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from pydantic import computed_field

from zero2all.track.run_metadata import PlannedRun, PlannedValue
from zero2all.track.run_view import RunView

WARMUP_SHARE = 0.1  # of the steps, left out


@dataclass(frozen=True)
class PlanCheck:
    """One value, planned and measured."""

    name: str
    unit: str
    planned: float
    measured: float
    note: str = ""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ratio(self) -> float:
        """Measured to planned."""
        return self.measured / self.planned if self.planned else math.nan


def compare_with_run(planned: PlannedRun, view: RunView) -> list[PlanCheck]:
    """Medians over the steps after warm-up, or the most of any rank; without what the run did not measure."""
    checks = []
    for value in planned.values:
        measured = _most(view, value) if value.over == "most" else _median(view, value)
        if measured is not None:
            checks.append(PlanCheck(value.name, value.unit, value.planned, measured / value.scale, value.note))
    return checks


def run_checks(view: RunView) -> list[PlanCheck]:
    """By the plan in the run's directory; none without one."""
    return compare_with_run(view.metadata.plan, view) if view.metadata.plan is not None else []


def _median(view: RunView, value: PlannedValue) -> float | None:
    values = view.table([value.metric]).mean[value.metric]
    values = values[int(WARMUP_SHARE * len(values)) :]
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def _most(view: RunView, value: PlannedValue) -> float | None:
    ranks = (view.finite_values(value.metric, rank=rank) for rank in view.readers)
    return max((float(values.max()) for values in ranks if len(values)), default=None)
