"""Durable checkpoints through torch DCP, each with a manifest of checksums that is written last.

A directory counts as a checkpoint only under its final name and with every checksum valid: DCP itself loads a
shard with a flipped bit silently. Checksums do not say who wrote it, so ``dcp_reader.py`` executes nothing in it.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import os
import re
import shutil
import time
import warnings
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from zero2all.checkpoint.dcp_reader import CheckpointReader
from zero2all.checkpoint.dcp_writer import CheckpointWriter
from zero2all.checkpoint.integrity import (
    MANIFEST_KIND,
    VALID,
    IntegrityResult,
    is_unfinished,
    verify_checksums,
    verify_sizes,
    worst_result,
)
from zero2all.checkpoint.rank_group import RankGroup
from zero2all.checkpoint.state_dict import (
    SyncState,
    drop_unsaved,
    flatten_tensors,
    load_training_state_dict,
    local_shard,
    training_state_dict,
)
from zero2all.checkpoint.training_state import (
    UNKNOWN_LINEAGE,
    CheckpointCallbacks,
    Lineage,
    SavedLineage,
    TrainingState,
    contains_state,
)
from zero2all.console import warn
from zero2all.errors import Z2aError, is_disk_full
from zero2all.io import (
    MANIFEST,
    atomic_dir,
    disk_full_error,
    json_text,
    read_json,
    remove_stale_staging,
    sha256_file,
    staging_dir,
    write_manifest,
    write_text,
)
from zero2all.paths import RemotePath, remove_objects
from zero2all.records import parse_record
from zero2all.units import show_seconds

STATE_FILE = "state.json"
STORAGE_PATIENCE = 600.0  # seconds that a restart waits for storage: a file server takes minutes to fail over
STORAGE_POLL, STORAGE_LOG_INTERVAL = 1.0, 60.0
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process needs no process group


def checkpoint_step(name: str) -> int | None:
    """The step of a checkpoint's directory, by its name; None if it is not the name of one."""
    match = re.fullmatch(r"step-(\d+)", name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class CheckpointHeader:
    """What retention and listings need of ``state.json``; it may be of an earlier version."""

    time: float | None = None
    permanent: bool = False
    bits_per_byte: float | None = None
    lineage: SavedLineage | None = None


class CheckpointStore:
    """The durable checkpoints of one run, newest last: on a disk that all ranks see, or in an object store."""

    def __init__(self, directory: Path, keep: int = 2, keep_best: int = 0) -> None:
        self.directory, self.keep, self.keep_best = directory, keep, keep_best
        self._verified: set[int] = set()  # by this process: their checksums were valid
        self._writer = CheckpointWriter()

    def steps(self) -> list[int]:
        found = (checkpoint_step(name) for name in self._entry_names())
        steps = sorted(step for step in found if step is not None)
        return [step for step in steps if self._exists(step)] if isinstance(self.directory, RemotePath) else steps

    def _exists(self, step: int) -> bool:
        """Some object stores still list a directory after its last object is gone."""
        path = self.path(step)
        assert isinstance(path, RemotePath)
        return (path / MANIFEST).exists() or bool(path.objects())

    def wait_until_readable(self, patience: float = STORAGE_PATIENCE) -> None:
        """Wait for storage that fails: restarts in a row would fail at the same step until the job is given up."""
        deadline = log_at = time.monotonic()
        deadline += patience
        while True:
            try:
                self.steps()
                return
            except (OSError, Z2aError) as error:
                if isinstance(error, PermissionError) or time.monotonic() >= deadline:
                    raise
                if time.monotonic() >= log_at:
                    left = show_seconds(deadline - time.monotonic())
                    warn(f"storage cannot be read: {error}; waiting for it, for another {left} at most")
                    log_at += STORAGE_LOG_INTERVAL
            time.sleep(STORAGE_POLL)

    def _entry_names(self) -> set[str]:
        """Names in the directory. A directory that cannot be listed is an error, not empty."""
        if isinstance(self.directory, RemotePath):
            return set(self.directory.children())
        try:
            with os.scandir(self.directory) as entries:
                return {entry.name for entry in entries}
        except (FileNotFoundError, NotADirectoryError):
            return set()

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08}"

    def read_state(self, step: int) -> TrainingState:
        path = self.path(step) / STATE_FILE
        return parse_record(TrainingState, read_json(path), path)

    def read_header(self, step: int) -> CheckpointHeader:
        path = self.path(step) / STATE_FILE
        return parse_record(CheckpointHeader, read_json(path), path)

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
        """All steps but those of abandoned histories, the newest last."""
        steps, abandoned = self._newest_first(lineage)
        return sorted(set(steps) - abandoned)

    def _newest_first(self, lineage: Lineage | None) -> tuple[list[int], set[int]]:
        """All steps, those of abandoned histories last, and which these are."""
        steps = list(reversed(self.steps()))
        abandoned = {step for step in steps if not _is_on_lineage(step, self.header_or_empty(step), lineage)}
        return sorted(steps, key=lambda step: step in abandoned), abandoned

    def is_valid(self, step: int) -> bool:
        return self.problem(step) is None

    def problem(self, step: int, rank_slice: tuple[int, int] = (0, 1)) -> str | None:
        """Why a checkpoint cannot be used, naming the file; None if it is valid."""
        result = self.verify(step, rank_slice)
        return None if result.kind == "valid" else result.reason

    def verify_state_file(self, step: int) -> IntegrityResult:
        """The checksum of what ``read_state`` reads, and the sizes of the other files."""
        return verify_checksums(self.path(step), step, only=STATE_FILE)

    def verify(self, step: int, rank_slice: tuple[int, int] = (0, 1)) -> IntegrityResult:
        result = verify_checksums(self.path(step), step, rank_slice)
        if result.kind != "valid":
            self._verified.discard(step)
        elif rank_slice == (0, 1):
            self._verified.add(step)
        return result

    def write(
        self,
        step: int,
        tensors: dict[str, Any],
        state: TrainingState,
        lineage: Lineage,
        rank_group: RankGroup,
        callbacks: CheckpointCallbacks | None = None,
    ) -> None:
        """Called on all ranks: each writes its own file and its checksum, then rank 0 the manifest."""
        on_phase = (callbacks or CheckpointCallbacks()).on_phase
        with ExitStack() as stack:
            partial = rank_group.on_rank0(lambda: stack.enter_context(self._begin(step)))
            place = partial
            if isinstance(partial, RemotePath):  # written here, then uploaded
                # A full disk on one rank must stop all of them: the next step is a collective.
                place = rank_group.on_all_ranks(lambda: stack.enter_context(staging_dir()))
            on_phase("persist")
            shards = dict(flatten_tensors(tensors))  # DCP would pickle everything else
            shown = place if isinstance(partial, RemotePath) else self.path(step)
            own = self._writer.write(place, shards, rank_group, lambda error: _write_error(shown, place, shards, error))

            def finish(published: list[dict[str, _PublishedFile]]) -> None:
                files = functools.reduce(operator.or_, published)
                fields = {"step": step, "time": round(time.time(), 3), **asdict(state), "lineage": lineage}
                text = json_text(fields)
                write_text(partial / STATE_FILE, text)
                digests = {name: file.sha256 for name, file in files.items()}
                digests[STATE_FILE] = hashlib.sha256(text.encode()).hexdigest()
                sizes = {name: file.size for name, file in files.items()}
                etags = {name: file.etag for name, file in files.items() if file.etag is not None}
                on_phase("manifest")
                body = {"key": str(step), "files": digests, "sizes": sizes, "etags": etags}
                write_manifest(partial, MANIFEST_KIND, body)
                stack.close()

            rank_group.gather(lambda: {path.name: _publish(path, partial) for path in own}, finish)
            self._verified.add(step)
        try:
            self._apply_retention(step, rank_group)
        except (OSError, Z2aError) as error:  # the new checkpoint is written all the same
            warn(f"old checkpoints in {self.directory} are not removed: {error}")

    def _begin(self, step: int) -> AbstractContextManager[Path]:
        path = self.path(step)
        if isinstance(path, RemotePath) and is_unfinished(path):
            # Its removal was interrupted after the manifest, which marks it as ours.
            remove_objects(path.objects())
        return atomic_dir(path, MANIFEST_KIND)

    def remove(self, step: int) -> None:
        path = self.path(step)
        self._verified.discard(step)
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

    def best_steps(self) -> list[int]:
        """Steps with a validation result, best first."""
        return _by_bits_per_byte({step: self.header_or_empty(step) for step in self.steps()})

    def header_or_empty(self, step: int) -> CheckpointHeader:
        """The header of a checkpoint that may be damaged."""
        try:
            return self.read_header(step)
        except (OSError, Z2aError):
            return CheckpointHeader()

    def _apply_retention(self, newest: int, rank_group: RankGroup) -> None:
        """Keep the newest valid checkpoints, the best by validation bits per byte, and the permanent ones.

        A damaged checkpoint, or one of an abandoned history, does not count: it is removed by age, or at once if it is
        damaged and of a later step, which the run will write again. An unreadable one is never removed for that.
        """
        steps: list[int] = rank_group.on_rank0(self.steps)
        to_remove = [step for step in steps if step > newest and self._verify_once(step, rank_group).kind == "damaged"]
        earlier = [step for step in steps if step <= newest]
        headers = rank_group.on_rank0(lambda: {step: self._header_for_retention(step) for step in earlier})
        lineage = headers[newest].lineage if newest in headers else None
        restorable = [step for step in reversed(earlier) if _is_on_lineage(step, headers[step], lineage)]
        kept = self._first_valid(restorable, self.keep, rank_group)
        if len(kept) == self.keep:
            old = [step for step in earlier if step < min(kept) and not headers[step].permanent]
            best = self._first_valid(_by_bits_per_byte(headers), self.keep_best, rank_group)
            to_remove += [step for step in old if step not in best]
        rank_group.on_rank0(lambda: self._remove_all(to_remove))

    def _remove_all(self, steps: list[int]) -> None:
        for step in steps:
            self.remove(step)

    def _first_valid(self, steps: list[int], count: int, rank_group: RankGroup) -> set[int]:
        valid: set[int] = set()
        for step in steps:
            if len(valid) == count:
                break
            if self._verify_once(step, rank_group).kind == "valid":
                valid.add(step)
        return valid

    def _verify_once(self, step: int, rank_group: RankGroup) -> IntegrityResult:
        """All ranks together hash the files of a checkpoint once; later rank 0 checks sizes only."""
        result = rank_group.on_rank0(lambda: verify_sizes(self.path(step), step) if step in self._verified else None)
        if result is None:
            rank_slice = (rank_group.rank, rank_group.world_size)
            result = rank_group.gather(lambda: verify_checksums(self.path(step), step, rank_slice), worst_result)
            if result == VALID:
                self._verified.add(step)
        return result

    def _header_for_retention(self, step: int) -> CheckpointHeader:
        try:
            return self.read_header(step)
        except (FileNotFoundError, NotADirectoryError):
            return CheckpointHeader()
        except (OSError, Z2aError) as error:
            # A damaged state says nothing; an unreadable one may be permanent.
            return CheckpointHeader(permanent=not isinstance(error.__cause__, ValueError))

    def load(
        self,
        step: int,
        model: nn.Module,
        optimizers: list[Optimizer],
        rank_group: RankGroup | None = None,
        sync: SyncState | None = None,
    ) -> None:
        """Load model, optimizers, random generators and ``sync`` as they were after ``step`` steps.

        Each rank reads what it needs. With a group, one that cannot fails on all of them.
        """
        state, reader = training_state_dict(model, optimizers, sync), self.reader(step)

        def read() -> None:
            drop_unsaved(state, reader.entries())
            reader.load(dict(flatten_tensors(state)))

        if rank_group is None:
            read()
        else:
            rank_group.on_all_ranks(read)
        load_training_state_dict(state, model, optimizers)

    def load_model(self, step: int, model: nn.Module) -> None:
        """Load only the weights."""
        weights = get_model_state_dict(model)
        self.reader(step).load(dict(flatten_tensors({"model": weights})))
        set_model_state_dict(model, weights)

    def reader(self, step: int) -> CheckpointReader:
        return CheckpointReader(self.path(step))


@dataclass(frozen=True)
class _PublishedFile:
    sha256: str
    size: int
    etag: str | None = None


def _publish(path: Path, directory: Path) -> _PublishedFile:
    """Hash a local file, and upload it if the checkpoint is in an object store."""
    etag = None
    if isinstance(directory, RemotePath):
        (directory / path.name).put(path)
        etag = (directory / path.name).etag()
    return _PublishedFile(sha256_file(path), path.stat().st_size, etag)


def _write_error(shown: Path, place: Path, shards: dict[str, Tensor], error: Exception) -> Z2aError:
    """Why torch could not write; of a full disk it says nothing."""
    needed = sum(shard.numel() * shard.element_size() for shard in map(local_shard, shards.values()))
    written = sum(path.stat().st_size for path in place.iterdir())
    if is_disk_full(error) or shutil.disk_usage(place).free < needed - written:
        return disk_full_error(shown, error, needed)
    return Z2aError(str(error).partition("\n")[0] or type(error).__name__)


def _is_on_lineage(step: int, header: CheckpointHeader, newest: Lineage | None) -> bool:
    """Whether the newest state descends from this one; others are never restored."""
    return newest is None or contains_state(newest, step, (header.lineage or UNKNOWN_LINEAGE)[-1].history)


def _by_bits_per_byte(headers: dict[int, CheckpointHeader]) -> list[int]:
    measured = [(header.bits_per_byte, step) for step, header in headers.items() if header.bits_per_byte is not None]
    return [step for _, step in sorted(measured)]
