"""``z2a blame --no-loss``: the documents in a step's batch, rebuilt from the run directory alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from zero2all.errors import UsageError
from zero2all.train.run import Run

MAX_TEXT_CHARS = 200  # of each document span


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


def trace_text(run: Run, step: int) -> dict[str, Any]:
    """What ``trace_step`` returns, each document span with its first words."""
    traced, tokenizer = trace_step(run, step), run.tokenizer()
    first, last = traced["samples"]
    tokens = run.plan().stage_of(step).dataset.tokens(first, last)
    end, sample = 0, first
    for span in traced["documents"]:
        start, sample = (end if span["sample"] == sample else 0), span["sample"]
        end = start + span["tokens"]
        # A token has a few characters: the start of a long document is enough.
        shown = tokens[sample - first, start : min(end, start + MAX_TEXT_CHARS)]
        span["text"] = tokenizer.decode(shown).strip("\ufffd")[:MAX_TEXT_CHARS]  # whole characters
    return traced
