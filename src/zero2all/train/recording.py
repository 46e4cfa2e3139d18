"""The record of a run: every step on every rank, and what happens beside the steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from zero2all.base.console import say
from zero2all.checkpoint import CheckpointCallbacks, CheckpointPhase, SentReplica
from zero2all.track import RunRecord, open_sinks
from zero2all.track.goodput import compute_run_goodput, format_goodput
from zero2all.train.run import Run


class Recorder:
    """The record of this rank. It is open while the run trains; threads that save checkpoints write to it too."""

    record: RunRecord

    def __init__(self, run: Run, rank: int, world_size: int) -> None:
        self._run, self._rank, self._world_size = run, rank, world_size

    @contextmanager
    def open(self) -> Iterator[None]:
        """Every rank writes its own record; the sinks of the recipe get the record of rank 0."""
        directory, options = self._run.directory, self._run.recipe.track
        sinks = open_sinks(options.sinks, directory) if self._rank == 0 else []
        with RunRecord(self._run.record_path, rank=self._rank, sinks=sinks, ranks=self._world_size) as self.record:
            yield

    def checkpoint_callbacks(
        self, on_wait: Callable[[], None], on_phase: Callable[[CheckpointPhase], None]
    ) -> CheckpointCallbacks:
        return CheckpointCallbacks(
            on_wait=on_wait,
            # A resume begins after the saved step, so the record must be written up to it.
            before_commit=lambda: not self.record.has_unwritten_lines(),
            on_saved=lambda step, seconds: self.record.event("checkpoint", step=step, seconds=round(seconds, 3)),
            on_phase=on_phase,
            on_replica=self._record_replica,
        )

    def _record_replica(self, sent: SentReplica) -> None:
        self.record.event("replica", **asdict(replace(sent, seconds=round(sent.seconds, 3))))

    def log_goodput(self, steps: int) -> float | None:
        """Log and record the goodput of the run over all its restarts, on rank 0 only."""
        if self._rank != 0:
            return None
        self.record.flush()
        report = compute_run_goodput(self._run.directory, ended=time.time())
        self.record.event("goodput", step=steps, **asdict(report))
        say(format_goodput(report))
        return report.goodput


@contextmanager
def automatic_gc_disabled() -> Iterator[None]:
    """Automatic garbage collection would stall one rank at a time while all others wait."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
