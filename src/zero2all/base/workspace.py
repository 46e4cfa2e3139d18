"""The directories of a workspace: the output of every stage, and the runs that share it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from zero2all.base.io import MANIFEST

STAGE_DIRECTORIES = ("documents", "tokenizer", "tokens")
DEFAULT_RUN = "run"
IDENTITY_FILE = "identity.json"  # a directory with this file belongs to a run
MAX_NAME_PARTS = 3  # of a run's directory below its workspace: experiments/NAME/VARIANT
MAX_DEPTH = 1 + MAX_NAME_PARTS  # below a directory of workspaces
# Directories that may have a million files, and no run; .work has the intermediate files of a stage.
UNSEARCHED_PATTERNS = (*STAGE_DIRECTORIES, "checkpoints", "*.work", ".?*")
NEW_RUN_COMMAND = "'z2a train RECIPE --name NAME', with the same overrides"  # for messages


def did_you_mean(path: Path) -> str:
    """The entry beside a path that does not exist with a name much like it, as the end of a message."""
    for depth, parent in enumerate(path.parents):
        if parent.is_dir():
            wrong = path.parts[len(path.parts) - 1 - depth]
            with suppress(OSError):
                names = [entry.name for entry in parent.iterdir() if not entry.name.startswith(".")]
                if close := difflib.get_close_matches(wrong, names, 1, cutoff=0.7):
                    rest = path.parts[len(path.parts) - depth :]
                    return f"; did you mean {parent.joinpath(close[0], *rest)}?"
            break
    return ""


def find_directories(top: Path, file: str, depth: int = MAX_DEPTH) -> list[Path]:
    """The directories in and below ``top`` that have ``file``, sorted. Links are followed."""
    return list(_find(top, file, depth, frozenset()))


def _find(top: Path, file: str, depth: int, above: frozenset[tuple[int, int]]) -> Iterator[Path]:
    try:
        status = top.stat()
        place = (status.st_dev, status.st_ino)
        with os.scandir(top) as scan:
            entries = {entry.name: entry for entry in scan}
    except OSError:  # not there, or not ours to read
        return
    if place in above:  # a link to a directory above itself
        return
    if file in entries:
        yield top
    if depth and not {MANIFEST, IDENTITY_FILE} & entries.keys():  # a stage's output or a run has no run inside
        for name in sorted(entries):
            if not is_unsearched(name) and entries[name].is_dir():
                yield from _find(top / name, file, depth - 1, above | {place})


def find_runs_below(workspace: Path) -> list[Path]:
    """The directories of the runs of a workspace."""
    return find_directories(workspace, IDENTITY_FILE, MAX_NAME_PARTS)


def workspace_of(run: Path, name: str) -> Path:
    """The workspace of the run in a directory, by its name: where it is now, since it may be moved or copied."""
    return run.absolute().parents[name.count("/")]


def is_unsearched(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in UNSEARCHED_PATTERNS)
