"""Follows a run for the page: refreshes it, checks its health, and tells what is new."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from zero2all.base.findings import Finding, PageFinding
from zero2all.track.eval_record import EvalCurve
from zero2all.track.health_checks import check_health
from zero2all.track.page_data import RunSummary, summarize_run
from zero2all.track.prometheus import RunSeries, run_series, unreadable_run
from zero2all.track.record_lines import RecordLine, restart_step
from zero2all.track.run_view import RunStatus, RunView, error_message

REFRESH_SECONDS = 0.5  # between two refreshes of a run
HEALTH_CHECK_SECONDS = 5.0
UNCHANGED_CHECK_SECONDS = 60.0  # between two health checks of a run that has written nothing: time alone can be a sign
CHECK_SHARE = 0.1  # of one core, for the health checks of all runs
QUIET_SECONDS = 30.0  # without a change, after which a run counts as quiet
QUIET_REFRESHES_PER_SECOND = 100  # of all quiet runs together


@dataclass(frozen=True)
class RunUpdate:
    """What changed in a run since the page was last told."""

    names: list[str]
    status: RunStatus
    verdicts: list[PageFinding]
    ranks: bool
    """Whether there are records of several ranks."""
    lines: list[RecordLine]
    reload: bool
    """Whether the page must load everything again."""
    evals: list[EvalCurve] | None
    """None if the page has them already."""


class SeenRun(NamedTuple):
    """What a page has of a run."""

    version: int
    sequence: int
    """Number of the newest line of the record."""
    evals: int
    """The version of the evaluations."""


class CheckBudget:
    """Limits the health checks of all runs together to a share of one core."""

    def __init__(self) -> None:
        self._lock, self._next = threading.Lock(), -math.inf

    def take(self) -> AbstractContextManager[None] | None:
        """A context for one check, whose time counts; None if the budget is used up for now."""
        with self._lock:
            if time.monotonic() < self._next:
                return None
            self._next = math.inf  # one at a time
        return self._spend()

    @contextmanager
    def _spend(self) -> Iterator[None]:
        begun = time.thread_time()
        try:
            yield
        finally:
            self._next = time.monotonic() + (time.thread_time() - begun) / CHECK_SHARE


class LiveRun:
    """A run, refreshed by one task and read by many requests."""

    def __init__(self, run: RunView, *, read: bool = True, budget: CheckBudget | None = None) -> None:
        """Reads the run, unless ``read`` leaves that to the first refresh. All runs of a page share ``budget``."""
        self._budget = budget or CheckBudget()
        self.run, self.lock, self.version = run, threading.Lock(), 0
        self._findings: list[Finding] = []
        self._last_health_check, self._failed = -math.inf, False
        self._changed_since_check, self._last_change = True, time.monotonic()
        self._summary: RunSummary | None = None
        if read:
            self.refresh()

    @property
    def summary(self) -> RunSummary:
        """The newest summary; empty for a run that has never been read."""
        return self._summary or RunSummary([], RunStatus(self.run.name), [], {}, {}, [], None, None, [])

    def refresh_interval(self, runs: int) -> float:
        """Seconds until the next refresh of one of ``runs`` runs."""
        is_quiet = time.monotonic() - self._last_change > QUIET_SECONDS
        return max(REFRESH_SECONDS, runs / QUIET_REFRESHES_PER_SECOND) if is_quiet else REFRESH_SECONDS

    def refresh(self) -> None:
        """Read what is new. A failure is shown for this run and never raised, so that the other runs are followed."""
        with self.lock:
            changed, failed = self.run.refresh(), self._failed
            try:
                self._update_summary(changed=changed or failed)
                self._failed = False
            except Exception as error:
                self._failed, message = True, error_message(error)
                if not failed or self.summary.status.trouble != message:
                    self._summary = replace(self.summary, status=replace(self.summary.status, trouble=message))
                    self.version += 1

    def series(self) -> RunSeries:
        """What ``/metrics`` has of this run."""
        with self.lock:
            try:
                return run_series(self.run, self.summary.status, self._findings)
            except Exception:  # the other runs are still exported
                return unreadable_run(self.run.name)

    def seen(self) -> SeenRun:
        """The state that a page has when it has just loaded this run."""
        return SeenRun(self.version, self.run.readers[0].recent.sequence, self.run.evals.version)

    def update_since(self, before: SeenRun) -> tuple[RunUpdate, SeenRun]:
        """What changed, and what the page has then."""
        with self.lock:
            lines = self.run.readers[0].recent.after(before.sequence)
            now, has_ranks, summary = self.seen(), len(self.run.readers) > 1, self.summary
        restarted = any(restart_step(line) is not None for line in lines)
        missed = now.sequence - before.sequence != len(lines)
        return (
            RunUpdate(
                names=summary.names,
                status=summary.status,
                verdicts=summary.verdicts,
                ranks=has_ranks,
                lines=lines,
                reload=restarted or (missed and bool(lines)),
                evals=None if now.evals == before.evals else summary.evals,
            ),
            now,
        )

    def _update_summary(self, *, changed: bool) -> None:
        if changed:
            self._changed_since_check, self._last_change = True, time.monotonic()
        finished = self.run.ended is not None and not changed and self._summary is not None
        due = HEALTH_CHECK_SECONDS if self._changed_since_check else max(UNCHANGED_CHECK_SECONDS, HEALTH_CHECK_SECONDS)
        is_due = not finished and time.monotonic() - self._last_health_check > due
        if is_due and (check := self._budget.take()) is not None:
            with check:
                before, self._findings = self._findings, check_health(self.run)
            self._last_health_check, self._changed_since_check = time.monotonic(), False
            changed = changed or before != self._findings
        if changed or self._summary is None:
            self._summary = summarize_run(self.run, self._findings)
            self.version += 1
