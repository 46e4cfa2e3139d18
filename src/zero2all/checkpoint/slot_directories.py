"""The directories of states in memory: one per run, and in it one per rank. Other users cannot write to them."""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from zero2all.base.io import write_text

SHM_DIRECTORY = Path("/dev/shm")
"""The default tmpfs of in-memory checkpoints."""
KEY_FILE = "key"  # in the directory of a run
_KEY = re.compile(r"[A-Za-z0-9_]{1,64}")
HISTORY_MARKER = "history"
ABANDONED_AFTER = 86400.0  # seconds after which the slots of a deleted run are removed


def flash_directory(parent: Path, key: str) -> Path:
    """The directory of a run; other users cannot guess its name."""
    return parent / f"z2a-{key}-{os.getuid()}"


def privacy_problem(directory: Path) -> str | None:
    """The reason why other users may have written there; None if only this user can, or if nothing is there."""
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(status.st_mode):
        return f"{directory} is not a directory"
    if status.st_uid != os.getuid():
        return f"{directory} belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{directory} can be written by other users"
    return None


def claim_flash_directory(directory: Path, run: Path) -> None:
    """Create the directory of a run, and remove the directories of deleted runs."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (reason := privacy_problem(directory)) is not None:
        raise PermissionError(reason)
    write_text(directory / "run", f"{run.absolute()}\n")
    for other in _abandoned_directories(directory.parent):
        shutil.rmtree(other, ignore_errors=True)


def _abandoned_directories(parent: Path) -> Iterator[Path]:
    for directory in parent.glob(f"z2a-*-{os.getuid()}"):
        if privacy_problem(directory) is not None:  # planted: what is in it may never end
            continue
        try:
            run = Path((directory / "run").read_text(encoding="utf-8").rstrip("\n"))
            newest = max(path.stat().st_mtime for path in directory.rglob("*"))
        except (OSError, ValueError):
            continue
        if not _belongs_to_run(run, directory) and time.time() - newest > ABANDONED_AFTER:
            yield directory


def _belongs_to_run(run: Path, directory: Path) -> bool:
    """Return whether a run owns these states: another run may have replaced it, with its own key."""
    key = read_key(run)
    return key is not None and flash_directory(directory.parent, key) == directory


def read_key(run: Path) -> str | None:
    """The key in the directory of a run; None if it has none, or none that we write: it becomes part of a path."""
    try:
        with open(run / KEY_FILE, encoding="utf-8") as stream:
            key = stream.read(100).strip()
    except (OSError, UnicodeDecodeError):  # only the owner of the run may read it
        return None
    return key if _KEY.fullmatch(key) else None


def rank_directory(directory: Path, rank: int, world_size: int, *, replica: bool = False) -> Path:
    """The directory of a rank's slots: its own, or replicas on another node."""
    return directory / f"{'replica' if replica else 'rank'}-{rank}-of-{world_size}"


def rank_directories(directory: Path) -> list[Path]:
    return sorted(path for kind in ("rank", "replica") for path in directory.glob(f"{kind}-*-of-*"))


def register_rank_directory(directory: Path, history: str) -> None:
    """Mark ``directory`` as used by a rank of this history."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_text(directory / HISTORY_MARKER, history)


def remove_stale_ranks(directory: Path, history: str) -> None:
    """Remove the slots of ranks no longer on this machine, and replicas that it is no longer to keep. All current
    ones must be registered."""
    for found in rank_directories(directory):
        try:
            stale = (found / HISTORY_MARKER).read_text(encoding="utf-8") != history
        except OSError:
            stale = True
        if stale:
            shutil.rmtree(found, ignore_errors=True)
