"""Durable checkpoints through torch DCP, each with a manifest of checksums that is written last.

Checksums do not say who wrote it, so ``dcp_reader.py`` executes nothing in it.
"""

from __future__ import annotations

import functools
import hashlib
import operator
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

from zero2all.base.console import warn
from zero2all.base.errors import Z2aError, is_disk_full
from zero2all.base.io import atomic_dir, disk_full_error, json_text, sha256_file, staging_dir, write_text
from zero2all.base.manifest import write_manifest
from zero2all.base.paths import RemotePath, remove_objects
from zero2all.checkpoint.checkpoint_directory import STATE_FILE, CheckpointDirectory
from zero2all.checkpoint.dcp_reader import CheckpointReader
from zero2all.checkpoint.dcp_writer import CheckpointWriter
from zero2all.checkpoint.integrity import MANIFEST_KIND, is_unfinished
from zero2all.checkpoint.rank_group import RankGroup
from zero2all.checkpoint.retention import Retention
from zero2all.checkpoint.state_dict import (
    SyncState,
    drop_unsaved,
    flatten_tensors,
    load_training_state_dict,
    local_shard,
    training_state_dict,
)
from zero2all.checkpoint.training_state import CheckpointCallbacks, Lineage, TrainingState

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process needs no process group


class CheckpointStore(CheckpointDirectory):
    """Writes the durable checkpoints of one run, with retention, and loads them into a model and its optimizers."""

    def __init__(self, directory: Path, keep: int = 2, keep_best: int = 0) -> None:
        super().__init__(directory)
        self.keep, self.keep_best = keep, keep_best
        self._writer = CheckpointWriter()

    def write(
        self,
        step: int,
        tensors: dict[str, Any],
        state: TrainingState,
        lineage: Lineage,
        rank_group: RankGroup,
        callbacks: CheckpointCallbacks | None = None,
    ) -> None:
        """Write a checkpoint, called on all ranks: each writes its own file and checksum, then rank 0 the manifest."""
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
            self.verified_steps.add(step)
        try:
            Retention(self, self.keep, self.keep_best, rank_group).apply(step)
        except (OSError, Z2aError) as error:  # the new checkpoint is written all the same
            warn(f"old checkpoints in {self.directory} are not removed: {error}")

    def _begin(self, step: int) -> AbstractContextManager[Path]:
        path = self.path(step)
        if isinstance(path, RemotePath) and is_unfinished(path):
            # Its removal was interrupted after the manifest, which marks it as ours.
            remove_objects(path.objects())
        return atomic_dir(path, MANIFEST_KIND)

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
    """The reason why torch could not write. Torch itself does not name a full disk."""
    needed = sum(shard.numel() * shard.element_size() for shard in map(local_shard, shards.values()))
    written = sum(path.stat().st_size for path in place.iterdir())
    if is_disk_full(error) or shutil.disk_usage(place).free < needed - written:
        return disk_full_error(shown, error, needed)
    return Z2aError(str(error).partition("\n")[0] or type(error).__name__)
