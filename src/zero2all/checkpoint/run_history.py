"""The current history of a run, which the run directory records in ``history.json``."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from zero2all.base.console import warn
from zero2all.base.errors import Z2aError
from zero2all.base.io import HISTORY_FILE, write_json
from zero2all.checkpoint.rank_group import RankGroup
from zero2all.checkpoint.restore import RestoreDecision, decision_summary
from zero2all.checkpoint.training_state import HistoryRecord, Lineage, extend_lineage, new_history_id


class RunHistory:
    """The lineage of the states saved from now on. All methods are called on all ranks."""

    def __init__(self, run_directory: Path, rank_group: RankGroup) -> None:
        self._path, self._rank_group = run_directory / HISTORY_FILE, rank_group
        self.lineage = extend_lineage((), 0, rank_group.on_rank0(new_history_id))
        self._unwritten: HistoryRecord | None = None

    def begin(self, parent: Lineage, step: int, decision: RestoreDecision | None) -> None:
        """Begin a new history from the state of ``step`` at the end of ``parent``, and record it."""
        self.lineage = extend_lineage(parent, step, self._rank_group.on_rank0(new_history_id))
        restored = None if decision is None else decision_summary(decision)
        self._unwritten = HistoryRecord(self.lineage, round(time.time(), 3), restored)
        self.write()

    def write(self) -> None:
        """Write the record, unless it is written. A failed write is retried with every durable checkpoint."""
        if self._unwritten is None:
            return
        record = asdict(self._unwritten)
        try:
            self._rank_group.on_rank0(lambda: write_json(self._path, record))
            self._unwritten = None
        except (Z2aError, OSError) as error:
            warn(
                f"{self._path} cannot be written: {error}; a restart may take an older "
                "history for the current one; the write is retried with the next durable checkpoint"
            )
