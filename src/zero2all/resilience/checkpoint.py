"""Durable checkpoints through torch DCP, each with a manifest of checksums that is written last.

A directory counts as a checkpoint only under its final name and with every checksum right: DCP itself loads a
shard with a flipped bit without a word. Checksums do not say who wrote it, so ``reader.py`` executes nothing in it.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import warnings
from contextlib import AbstractContextManager, ExitStack
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
from zero2all.io import (
    MANIFEST,
    atomic_dir,
    read_json,
    remove_staging_of_the_dead,
    sha256_file,
    staging,
    write_json,
    write_manifest,
)
from zero2all.paths import RemotePath
from zero2all.resilience.condition import KIND, VALID, Condition, examine, glance, is_unfinished, worst
from zero2all.resilience.lineage import UNKNOWN, Lineage, from_json, passes_through, to_json
from zero2all.resilience.reader import CheckpointReader, reasons
from zero2all.resilience.state import put_state, state_of, tensors_in
from zero2all.resilience.team import Team

STATE = "state.json"
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process needs no group


class Checkpoints:
    """The durable checkpoints of one run, newest last: on a disk that all ranks see, or in an object store."""

    def __init__(self, directory: Path, keep: int = 2, keep_best: int = 0) -> None:
        self.directory, self.keep, self.keep_best = directory, keep, keep_best
        self._verified: set[int] = set()  # by this process: their checksums were right

    def steps(self) -> list[int]:
        matches = (re.fullmatch(r"step-(\d+)", name) for name in self._names())
        return sorted(int(match[1]) for match in matches if match)

    def _names(self) -> set[str]:
        """What is in the directory. One that cannot be listed is an error: it is not empty."""
        if isinstance(self.directory, RemotePath):
            return {path.relative_to(self.directory).parts[0] for path in self.directory.objects()}
        try:
            with os.scandir(self.directory) as entries:
                return {entry.name for entry in entries}
        except (FileNotFoundError, NotADirectoryError):
            return set()

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08}"

    def state(self, step: int) -> dict[str, Any]:
        state = read_json(self.path(step) / STATE)
        if not isinstance(state, dict):
            raise Z2aError(f"{self.path(step) / STATE} is damaged: choose another step") from ValueError(state)
        return state

    def newest(self, line: Lineage | None = None) -> int | None:
        """The newest valid checkpoint; damaged ones are skipped with a warning.

        With the lineage of a run, one of a history that it has abandoned is taken only if there is no other.
        """
        current = {} if line is None else {"lineage": to_json(line)}
        steps = list(reversed(self.steps()))
        abandoned = [step for step in steps if not _is_on_line(step, self.noted(step), current)]
        for step in sorted(steps, key=lambda step: step in abandoned):
            problem = self.problem(step)
            if problem is None:
                if step in abandoned:
                    warn(f"checkpoint {self.path(step)} is of an abandoned history: no later one is valid")
                return step
            warn(f"checkpoint {self.path(step)} is skipped: {problem}")
        return None

    def is_whole(self, step: int) -> bool:
        return self.problem(step) is None

    def problem(self, step: int, share: tuple[int, int] = (0, 1)) -> str | None:
        """Why a checkpoint cannot be used, the file named; nothing if it can."""
        condition = self.examine(step, share)
        return None if condition.kind == "valid" else condition.reason

    def examine(self, step: int, share: tuple[int, int] = (0, 1)) -> Condition:
        condition = examine(self.path(step), step, share)
        if condition.kind != "valid":
            self._verified.discard(step)
        elif share == (0, 1):
            self._verified.add(step)
        return condition

    def write(self, step: int, tensors: dict[str, Any], state: dict[str, Any], team: Team) -> None:
        """All ranks together: each its own file and that file's checksum, then the first the manifest of all."""
        with ExitStack() as stack:
            partial = team.first(lambda: stack.enter_context(self._begin(step)))
            place = partial
            if isinstance(partial, RemotePath):  # written here, then uploaded
                # One rank without room must stop all of them: the next step is a collective.
                place = team.together(lambda: stack.enter_context(staging()))[team.rank]
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

            def publish() -> dict[str, tuple[str, int]]:
                if isinstance(partial, RemotePath):
                    for path in own:
                        (partial / path.name).put(path)
                return {path.name: (sha256_file(path), path.stat().st_size) for path in own}

            files = {name: entry for found in team.together(publish) for name, entry in found.items()}

            def finish() -> None:
                write_json(partial / STATE, {"step": step, "time": round(time.time(), 3), **state})
                digests = {name: digest for name, (digest, _) in files.items()}
                digests[STATE] = sha256_file(partial / STATE)
                sizes = {name: size for name, (_, size) in files.items()}
                write_manifest(partial, KIND, {"key": str(step), "files": digests, "sizes": sizes})
                stack.close()

            team.first(finish)
            self._verified.add(step)
        try:
            self._keep_within_bounds(step, team)
        except (OSError, Z2aError) as error:  # this one is written all the same
            warn(f"old checkpoints in {self.directory} are not removed: {error}")

    def _begin(self, step: int) -> AbstractContextManager[Path]:
        path = self.path(step)
        if isinstance(path, RemotePath) and is_unfinished(path):
            # Its removal was cut short after the manifest, without which nobody could tell that it is ours.
            for inner in path.objects():
                inner.unlink(missing_ok=True)
        return atomic_dir(path, KIND)

    def remove(self, step: int) -> None:
        path = self.path(step)
        self._verified.discard(step)
        if isinstance(path, RemotePath):
            (path / MANIFEST).unlink(missing_ok=True)  # what is half removed does not count
            for inner in path.objects():
                inner.unlink(missing_ok=True)
        else:
            # Not under its name while files vanish one by one; the next start removes what a killed process left.
            removed = path.with_name(f".{path.name}.removed-{os.getpid()}")
            path.rename(removed)
            shutil.rmtree(removed)

    def remove_after(self, step: int) -> None:
        """Of a history that the run has left."""
        for later in self.steps():
            if later > step:
                self.remove(later)

    def remove_leftovers(self) -> None:
        """What killed processes were writing or removing. Only for the one process that holds the run."""
        remove_staging_of_the_dead()
        if isinstance(self.directory, RemotePath):
            for step in self.steps():
                try:
                    if is_unfinished(self.path(step)):
                        self.remove(step)
                except Z2aError as error:
                    warn(f"{self.path(step)} is left as it is: {error}")
            return
        for name in self._names():
            if re.fullmatch(r"\.step-\d+\.(partial|old|removed)-.+", name):
                shutil.rmtree(self.directory / name, ignore_errors=True)

    def best(self) -> list[int]:
        """Steps at which held-out text was measured, best first."""
        return _by_quality({step: self.noted(step) for step in self.steps()})

    def noted(self, step: int) -> dict[str, Any]:
        """The state of a checkpoint that may be damaged."""
        try:
            return self.state(step)
        except (OSError, Z2aError):
            return {}

    def _keep_within_bounds(self, newest: int, team: Team) -> None:
        """The newest valid ones stay, the best by held-out text, and those that are to stay for good.

        A damaged one counts for nothing, nor does one of a history that the run has left: it goes with those as old as
        itself, or at once if it is damaged and of a later step, which the run comes to again. One that cannot be read
        is never removed for that.
        """
        steps: list[int] = team.first(self.steps)
        doomed = [step for step in steps if step > newest and self._condition(step, team).kind == "damaged"]
        earlier = [step for step in steps if step <= newest]
        notes = team.first(lambda: {step: self._note(step) for step in earlier})
        restorable = [step for step in reversed(earlier) if _is_on_line(step, notes[step], notes.get(newest, {}))]
        kept = self._first_valid(restorable, self.keep, team)
        if len(kept) == self.keep:
            old = [step for step in earlier if step < min(kept) and not notes[step].get("permanent")]
            best = self._first_valid(_by_quality(notes), self.keep_best, team)
            doomed += [step for step in old if step not in best]
        team.first(lambda: self._remove_all(doomed))

    def _remove_all(self, steps: list[int]) -> None:
        for step in steps:
            self.remove(step)

    def _first_valid(self, steps: list[int], count: int, team: Team) -> set[int]:
        found: set[int] = set()
        for step in steps:
            if len(found) == count:
                break
            if self._condition(step, team).kind == "valid":
                found.add(step)
        return found

    def _condition(self, step: int, team: Team) -> Condition:
        """All ranks read the files of a checkpoint once; later a glance of the first is enough."""
        known = team.first(lambda: glance(self.path(step), step) if step in self._verified else None)
        if known is None:
            share = (team.rank, team.world)
            known = worst(team.together(lambda: examine(self.path(step), step, share)))
            if known == VALID:
                self._verified.add(step)
        return known

    def _note(self, step: int) -> dict[str, Any]:
        try:
            return self.state(step)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, Z2aError) as error:
            # Damaged, it says nothing; what cannot be read may say that it is to stay.
            return {"permanent": not isinstance(error.__cause__, ValueError)}

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


def _is_on_line(step: int, note: dict[str, Any], newest: dict[str, Any]) -> bool:
    """Whether the newest state descends from this one: no other would be restored."""
    if "lineage" not in newest:
        return True
    try:
        history = from_json(note["lineage"])[-1].history if "lineage" in note else UNKNOWN[-1].history
    except Z2aError:
        return False
    return passes_through(from_json(newest["lineage"]), step, history)


def _by_quality(notes: dict[int, dict[str, Any]]) -> list[int]:
    measured = [(note["bits_per_byte"], step) for step, note in notes.items() if note.get("bits_per_byte") is not None]
    return [step for _, step in sorted(measured)]
