"""The directories of a workspace: the output of every stage, and the runs that share it."""

from __future__ import annotations

import os
from pathlib import Path

from zero2all.io import MANIFEST

STAGE_DIRECTORIES = ("documents", "tokenizer", "tokens")
DEFAULT_RUN = "run"
IDENTITY_FILE = "identity.json"  # a directory with this file is that of a run
MAX_NAME_PARTS = 3  # of a run's directory below its workspace: experiments/NAME/VARIANT
MAX_DEPTH = 1 + MAX_NAME_PARTS  # below a directory of workspaces
UNSEARCHED_NAMES = (*STAGE_DIRECTORIES, "checkpoints")  # they may have a million files, and no run
NEW_RUN_COMMAND = "'z2a train RECIPE --name NAME', with the same overrides"  # for messages
WORK_SUFFIX = ".work"  # of a stage's intermediate files


def find_directories(top: Path, file: str, depth: int = MAX_DEPTH) -> list[Path]:
    """The directories in and below ``top`` that have ``file``, sorted."""
    try:
        with os.scandir(top) as scan:
            entries = {entry.name: entry for entry in scan}
    except OSError:  # not there, or not ours to read
        return []
    found = [top] if file in entries else []
    if depth and not {MANIFEST, IDENTITY_FILE} & entries.keys():  # a stage's output or a run has no run inside
        for name in sorted(entries):
            if not is_unsearched(name) and entries[name].is_dir():
                found += find_directories(top / name, file, depth - 1)
    return found


def find_runs_below(top: Path) -> list[Path]:
    """The directories of the runs in and below ``top``."""
    return find_directories(top, IDENTITY_FILE)


def workspace_of(run: Path, name: str) -> Path:
    """The workspace of the run in a directory, by its name: where it is now, since it may be moved or copied."""
    return run.absolute().parents[name.count("/")]


def is_unsearched(name: str) -> bool:
    return name in UNSEARCHED_NAMES or name.endswith(WORK_SUFFIX) or name.startswith(".")
