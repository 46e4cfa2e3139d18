"""``z2a tokens trace``: the documents behind a step, rebuilt from the run directory alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from zero2all.errors import UsageError
from zero2all.train.run import Run


def trace_step(run: Run, step: int) -> dict[str, Any]:
    """Every document with a token in the batch of ``step`` (counted from 0, as in the record)."""
    if step < 0:
        raise UsageError("steps are counted from 0")
    samples = run.samples()
    size = run.recipe.train.batch_samples
    parts = samples.documents(step * size, (step + 1) * size)
    return {
        "run": str(run.directory),
        "step": step,
        "samples": [step * size, (step + 1) * size],
        "documents": [asdict(part) for part in parts],
    }
