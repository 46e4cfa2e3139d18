"""Durable checkpoints through torch DCP, each with a manifest of checksums that is written last.

A directory counts as a checkpoint only under its final name and with every checksum right: DCP itself loads a
shard with a flipped bit without a word. Checksums do not say who wrote it, so ``reader.py`` executes nothing in it.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from zero2all.console import warn
from zero2all.errors import Z2aError
from zero2all.io import MANIFEST, atomic_dir, read_json, read_manifest, sha256_file, write_json, write_manifest
from zero2all.paths import RemotePath
from zero2all.resilience.reader import CheckpointReader, reasons
from zero2all.resilience.state import put_state, state_of, tensors_in
from zero2all.resilience.team import Team

KIND = "checkpoint"
STATE = "state.json"
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process needs no group


class Checkpoints:
    """The durable checkpoints of one run, newest last: on a disk that all ranks see, or in an object store."""

    def __init__(self, directory: Path, keep: int = 2, keep_best: int = 0) -> None:
        self.directory, self.keep, self.keep_best = directory, keep, keep_best

    def steps(self) -> list[int]:
        if isinstance(self.directory, RemotePath):
            names = {path.relative_to(self.directory).parts[0] for path in self.directory.objects()}
        else:
            names = {path.name for path in self.directory.glob("step-*")}
        matches = (re.fullmatch(r"step-(\d+)", name) for name in names)
        return sorted(int(match[1]) for match in matches if match)

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08}"

    def state(self, step: int) -> dict[str, Any]:
        state: dict[str, Any] = read_json(self.path(step) / STATE)
        return state

    def newest(self) -> int | None:
        """The newest whole checkpoint; damaged ones are passed over aloud."""
        for step in reversed(self.steps()):
            problem = self.problem(step)
            if problem is None:
                return step
            warn(f"checkpoint {self.path(step)} is passed over: {problem}")
        return None

    def is_whole(self, step: int) -> bool:
        return self.problem(step) is None

    def problem(self, step: int, share: tuple[int, int] = (0, 1)) -> str | None:
        """What is wrong with a checkpoint, the file named; nothing if it is whole.

        Rank r of R looks at every R-th file from r on: all ranks together read it once.
        """
        try:
            manifest = read_manifest(self.path(step), KIND, "z2a train")
        except (Z2aError, OSError, ValueError):
            return f"{MANIFEST} is missing, damaged or of something unfinished"
        if manifest.get("key") != str(step):
            return f"{MANIFEST} is of another step"
        rank, ranks = share
        for name in sorted(manifest["files"])[rank::ranks]:
            path = self.path(step) / name
            if not path.exists():
                return f"{name} is missing"
            if sha256_file(path) != manifest["files"][name]:
                return f"{name} does not match its checksum"
        return None

    def write(self, step: int, tensors: dict[str, Any], state: dict[str, Any], team: Team) -> None:
        """All ranks together: each its own file and that file's checksum, then the first the manifest of all."""
        with ExitStack() as stack:
            partial = team.first(lambda: stack.enter_context(atomic_dir(self.path(step), KIND)))
            place = partial
            if isinstance(partial, RemotePath):  # written here, then put there whole
                place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="z2a-checkpoint-")))
            try:
                state_dict_saver.save(
                    dict(tensors_in(tensors)),  # DCP would pickle all else
                    storage_writer=FileSystemWriter(place),
                    process_group=team.group,
                    no_dist=team.group is None,
                )
            except CheckpointException as error:
                raise Z2aError(reasons(error)) from error
            own = [place / ".metadata"] if team.rank == 0 else []
            own += sorted(place.glob(f"__{team.rank}_*"))

            def publish() -> dict[str, str]:
                if isinstance(partial, RemotePath):
                    for path in own:
                        (partial / path.name).put(path)
                return {path.name: sha256_file(path) for path in own}

            files = {name: digest for found in team.together(publish) for name, digest in found.items()}

            def finish() -> None:
                write_json(partial / STATE, {"step": step, "time": round(time.time(), 3), **state})
                files[STATE] = sha256_file(partial / STATE)
                write_manifest(partial, KIND, {"key": str(step), "files": files})
                stack.close()

            team.first(finish)
            team.first(lambda: self._keep_within_bounds(step))

    def remove(self, step: int) -> None:
        path = self.path(step)
        (path / MANIFEST).unlink(missing_ok=True)  # what is half removed does not count
        if isinstance(path, RemotePath):
            for inner in path.objects():
                inner.unlink(missing_ok=True)
        else:
            shutil.rmtree(path)

    def remove_after(self, step: int) -> None:
        for later in self.steps():
            if later > step:
                self.remove(later)

    def best(self) -> list[int]:
        """Steps at which held-out text was measured, best first."""
        measured = {step: self.noted(step).get("bits_per_byte") for step in self.steps()}
        return [step for _, step in sorted((value, step) for step, value in measured.items() if value is not None)]

    def noted(self, step: int) -> dict[str, Any]:
        """The state of a checkpoint that may be damaged."""
        try:
            return self.state(step)
        except (OSError, Z2aError):
            return {}

    def _keep_within_bounds(self, newest: int) -> None:
        """The newest stay, the best by held-out text, and those that are to stay for good.

        What is of a later step was passed over, as damaged, when the run went on from before it.
        """
        self.remove_after(newest)
        steps = self.steps()
        kept = {*steps[-self.keep :], *(self.best()[: self.keep_best] if self.keep_best else [])}
        for step in steps:
            if step not in kept and not self.noted(step).get("permanent"):
                self.remove(step)

    def load(self, step: int, model: nn.Module, optimizers: list[Optimizer]) -> None:
        """Model, optimizers and random generators as they were when ``step`` steps were done."""
        state, reader = state_of(model, optimizers), self.reader(step)
        # A run may move to other machines and another number of them: only the generators that were there come back.
        saved = reader.read_metadata().state_dict_metadata
        state["rng"] = {name: value for name, value in state["rng"].items() if f"rng.{name}" in saved}
        reader.load(dict(tensors_in(state)))
        put_state(state, model, optimizers)

    def load_model(self, step: int, model: nn.Module) -> None:
        """The weights alone."""
        weights = get_model_state_dict(model)
        self.reader(step).load(dict(tensors_in({"model": weights})))
        set_model_state_dict(model, weights)

    def reader(self, step: int) -> CheckpointReader:
        return CheckpointReader(self.path(step))
