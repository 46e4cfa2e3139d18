"""``z2a tokens trace``: the documents in a step's batch, rebuilt from the run directory alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from zero2all.errors import UsageError
from zero2all.train.run import Run


def trace_step(run: Run, step: int) -> dict[str, Any]:
    """Every document with a token in the batch of ``step`` (counted from 0, as in the record)."""
    plan = run.plan()
    if not 0 <= step < plan.total_steps:
        raise UsageError(f"the run has steps 0 to {plan.total_steps - 1}")
    stage = plan.stage_of(step)
    start, stop = stage.sample_range(step)
    return {
        "run": str(run.directory),
        "step": step,
        "stage": stage.name,
        "samples": [start, stop],
        "documents": [asdict(span) for span in stage.dataset.documents(start, stop)],
    }
