"""Whether a failed job is restarted."""

from __future__ import annotations

from collections import Counter

from zero2all.elastic.exit_reason import FailureKind

MAX_FAILURES_PER_STEP = 3  # failures at one step before the job is given up
MAX_FAILURES_WITHOUT_PROGRESS = 10  # failures in a row without progress, at any step
MAX_BACKOFF = 60.0


class RestartPolicy:
    """Counts failures by step, and decides on restarts."""

    def __init__(self, sees_progress: bool = True) -> None:
        """``sees_progress`` is False for a script: as long as it sends no heartbeat, only the number of restarts
        limits them."""
        self._sees_progress = sees_progress
        self._failures_by_step: Counter[int] = Counter()
        self._failures_without_progress = 0
        self._furthest = -1

    def record_progress(self, step: int) -> None:
        """Progress resets the counters."""
        if step > self._furthest:
            self._furthest, self._failures_without_progress = step, 0
            self._failures_by_step.clear()

    def reason_to_give_up(self, kind: FailureKind, step: int, nodes: int | None, restarts_left: int) -> str | None:
        """Count a failure; the reason not to restart, if there is one."""
        if kind == "wrong usage":
            return "not tried again: it would fail the same way"
        if kind == "stopped":
            # With several nodes another one may be leaving; those that stay continue.
            return None if (nodes or 1) > 1 else "stopped: the same command resumes from there"
        if kind != "cut off" or (nodes or 1) == 1:  # otherwise another node failed at this step, not this one
            self._failures_by_step[step] += 1
        self._failures_without_progress += 1
        where = f"after step {step}" if step >= 0 else "before the first step"
        if not self._sees_progress and self._furthest < 0:
            return None if restarts_left else "given up: no restarts are left (--max-restarts)"
        if self._failures_by_step[step] >= MAX_FAILURES_PER_STEP:
            return f"given up: it failed {MAX_FAILURES_PER_STEP} times {where}, so a restart would too"
        if self._failures_without_progress >= MAX_FAILURES_WITHOUT_PROGRESS:
            failures = f"{MAX_FAILURES_WITHOUT_PROGRESS} failures in a row"
            return f"given up: {failures} without getting past step {self._furthest}"
        return None if restarts_left else f"given up {where}: no restarts are left (--max-restarts)"

    def backoff(self) -> float:
        """Seconds before the next restart: none at first, then exponential without progress."""
        return (
            0.0
            if self._failures_without_progress < 2
            else min(MAX_BACKOFF, 2.0 ** (self._failures_without_progress - 1))
        )
