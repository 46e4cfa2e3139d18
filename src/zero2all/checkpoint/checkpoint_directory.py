"""The checkpoints in a directory: which there are, what their state files say, whether they are valid; and removal.

A directory counts as a checkpoint only under its final name and with every checksum valid: DCP itself loads a
shard with a flipped bit silently.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from zero2all.base.console import warn
from zero2all.base.errors import Z2aError
from zero2all.base.io import MANIFEST, read_json, remove_stale_staging
from zero2all.base.paths import RemotePath, remove_objects
from zero2all.base.records import parse_record
from zero2all.base.units import show_seconds
from zero2all.checkpoint.integrity import IntegrityResult, is_unfinished, verify_checksums
from zero2all.checkpoint.training_state import UNKNOWN_LINEAGE, Lineage, SavedLineage, TrainingState, contains_state

STATE_FILE = "state.json"
STORAGE_PATIENCE = 600.0  # seconds that a restart waits for storage: a file server takes minutes to fail over
STORAGE_POLL, STORAGE_LOG_INTERVAL = 1.0, 60.0


def checkpoint_step(name: str) -> int | None:
    """The step of a checkpoint's directory, by its name; None if it is not the name of one."""
    match = re.fullmatch(r"step-(\d+)", name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class CheckpointHeader:
    """The part of ``state.json`` that retention and listings need; it may be of an earlier version."""

    time: float | None = None
    permanent: bool = False
    bits_per_byte: float | None = None
    lineage: SavedLineage | None = None


class CheckpointDirectory:
    """The durable checkpoints of one run, newest last: on a disk that all ranks see, or in an object store."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.verified_steps: set[int] = set()
        """Checkpoints whose checksums this process found valid; retention does not compute them again."""

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08}"

    def steps(self) -> list[int]:
        found = (checkpoint_step(name) for name in self._entry_names())
        return [step for step in sorted(step for step in found if step is not None) if _exists(self.path(step))]

    def _entry_names(self) -> set[str]:
        """Names in the directory. A directory that cannot be listed is an error, not empty."""
        if isinstance(self.directory, RemotePath):
            return set(self.directory.children())
        try:
            with os.scandir(self.directory) as entries:
                return {entry.name for entry in entries}
        except (FileNotFoundError, NotADirectoryError):
            return set()

    def read_state(self, step: int) -> TrainingState:
        path = self.path(step) / STATE_FILE
        return parse_record(TrainingState, read_json(path), path)

    def read_header(self, step: int) -> CheckpointHeader:
        path = self.path(step) / STATE_FILE
        return parse_record(CheckpointHeader, read_json(path), path)

    def header_or_empty(self, step: int) -> CheckpointHeader:
        """The header of a checkpoint that may be damaged."""
        try:
            return self.read_header(step)
        except (OSError, Z2aError):
            return CheckpointHeader()

    def newest_valid(self, lineage: Lineage | None = None) -> int | None:
        """The newest valid checkpoint; damaged ones are skipped with a warning.

        With the lineage of a run, a checkpoint of an abandoned history is used only if there is no other.
        """
        steps, abandoned = self._newest_first(lineage)
        for step in steps:
            problem = self.problem(step)
            if problem is None:
                if step in abandoned:
                    warn(f"checkpoint {self.path(step)} is of an abandoned history: no later one is valid")
                return step
            warn(f"checkpoint {self.path(step)} is skipped: {problem}")
        return None

    def newest(self, lineage: Lineage | None = None) -> int | None:
        """The same without reading it: it may be damaged."""
        steps, _ = self._newest_first(lineage)
        return steps[0] if steps else None

    def current_steps(self, lineage: Lineage | None) -> list[int]:
        """All steps, the newest last, without abandoned histories."""
        steps, abandoned = self._newest_first(lineage)
        return sorted(set(steps) - abandoned)

    def _newest_first(self, lineage: Lineage | None) -> tuple[list[int], set[int]]:
        """All steps, abandoned histories last; and the steps of these."""
        steps = list(reversed(self.steps()))
        abandoned = {step for step in steps if not is_on_lineage(step, self.header_or_empty(step), lineage)}
        return sorted(steps, key=lambda step: step in abandoned), abandoned

    def best_steps(self) -> list[int]:
        """Steps with a validation result, best first."""
        return by_bits_per_byte({step: self.header_or_empty(step) for step in self.steps()})

    def is_valid(self, step: int) -> bool:
        return self.problem(step) is None

    def problem(self, step: int) -> str | None:
        """The reason why a checkpoint cannot be used, which names the file; None if it is valid."""
        result = self.verify(step)
        return None if result.kind == "valid" else result.reason

    def verify_state_file(self, step: int) -> IntegrityResult:
        """The checksum of what ``read_state`` reads, and the sizes of the other files."""
        return verify_checksums(self.path(step), step, only=STATE_FILE)

    def verify(self, step: int, rank_slice: tuple[int, int] = (0, 1)) -> IntegrityResult:
        result = verify_checksums(self.path(step), step, rank_slice)
        if result.kind != "valid":
            self.verified_steps.discard(step)
        elif rank_slice == (0, 1):
            self.verified_steps.add(step)
        return result

    def remove(self, step: int) -> None:
        path = self.path(step)
        self.verified_steps.discard(step)
        if isinstance(path, RemotePath):
            (path / MANIFEST).unlink(missing_ok=True)  # a half-removed checkpoint is not valid
            remove_objects(path.objects())
        else:
            # Renamed first, while its files are removed one by one; the next start removes what a killed process left.
            removed = path.with_name(f".{path.name}.removed-{os.getpid()}")
            path.rename(removed)
            shutil.rmtree(removed)

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of an abandoned history after ``step``."""
        for later in self.steps():
            if later > step:
                self.remove(later)

    def remove_leftovers(self) -> None:
        """Remove what killed processes were writing or removing. Only for the process that holds the run lock."""
        remove_stale_staging()
        if isinstance(self.directory, RemotePath):
            for step in self.steps():
                try:
                    if is_unfinished(self.path(step)):
                        self.remove(step)
                except Z2aError as error:
                    warn(f"{self.path(step)} is not removed: {error}")
            return
        for name in self._entry_names():
            if re.fullmatch(r"\.step-\d+\.(partial|old|removed)-.+", name):
                shutil.rmtree(self.directory / name, ignore_errors=True)


def _exists(checkpoint: Path) -> bool:
    """Return whether it is there: some object stores list a directory after its last object is gone."""
    return not isinstance(checkpoint, RemotePath) or (checkpoint / MANIFEST).exists() or bool(checkpoint.objects())


def wait_until_readable(checkpoints: CheckpointDirectory, patience: float = STORAGE_PATIENCE) -> None:
    """Wait for storage that fails: restarts in a row would fail at the same step until the job is given up."""
    deadline = log_at = time.monotonic()
    deadline += patience
    while True:
        try:
            checkpoints.steps()
            return
        except (OSError, Z2aError) as error:
            if isinstance(error, PermissionError) or time.monotonic() >= deadline:
                raise
            if time.monotonic() >= log_at:
                left = show_seconds(deadline - time.monotonic())
                warn(f"storage cannot be read: {error}; waiting for it, for another {left} at most")
                log_at += STORAGE_LOG_INTERVAL
        time.sleep(STORAGE_POLL)


def is_on_lineage(step: int, header: CheckpointHeader, newest: Lineage | None) -> bool:
    """Return whether the newest state descends from this one; others are never restored."""
    return newest is None or contains_state(newest, step, (header.lineage or UNKNOWN_LINEAGE)[-1].history)


def by_bits_per_byte(headers: dict[int, CheckpointHeader]) -> list[int]:
    """The steps with a validation result, best first."""
    measured = [(header.bits_per_byte, step) for step, header in headers.items() if header.bits_per_byte is not None]
    return [step for _, step in sorted(measured)]
