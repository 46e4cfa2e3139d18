"""``z2a tokens trace``: the documents behind a step, rebuilt from the run directory alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from zero2all.errors import UsageError
from zero2all.train.run import Run


def trace_step(run: Run, step: int) -> dict[str, Any]:
    """Every document with a token in the batch of ``step`` (counted from 0, as in the record)."""
    plan = run.plan()
    if not 0 <= step < plan.total:
        raise UsageError(f"the run has steps 0 to {plan.total - 1}")
    stage = plan.at(step)
    start, stop = stage.batch(step)
    return {
        "run": str(run.directory),
        "step": step,
        "stage": stage.name,
        "samples": [start, stop],
        "documents": [asdict(part) for part in stage.samples.documents(start, stop)],
    }
