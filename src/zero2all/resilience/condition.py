"""Whether a checkpoint can be used: its manifest and the checksums of its files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zero2all.errors import Z2aError
from zero2all.io import MANIFEST, sha256_file
from zero2all.paths import RemotePath

KIND = "checkpoint"
RETRY_AFTER = (0.5, 2.0)  # seconds: a file server that stumbles is usually back by then
GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@dataclass(frozen=True)
class Condition:
    """``damaged``: what is there is wrong, for good. ``unreadable``: nobody knows, so nothing may be removed for it."""

    kind: Literal["valid", "damaged", "unreadable"]
    reason: str = ""


VALID = Condition("valid")


class DamagedError(Exception):
    """What was read is wrong, and will be when it is read again."""


@dataclass(frozen=True)
class _Manifest:
    files: dict[str, str]
    sizes: dict[str, int]


def examine(path: Path, step: int, share: tuple[int, int] = (0, 1)) -> Condition:
    """Compute the checksums again. Rank r of R looks at every R-th file from r on: all ranks together read it once."""

    def look() -> None:
        manifest = _read_manifest(path, step)
        rank, ranks = share
        for name in sorted(manifest.files)[rank::ranks]:
            try:
                digest = sha256_file(path / name)
            except GONE:
                raise DamagedError(f"{name} is missing") from None
            if digest != manifest.files[name]:
                raise DamagedError(f"{name} does not match its checksum")

    return patiently(look)


def glance(path: Path, step: int) -> Condition:
    """Only that the manifest is there, and every file with its size: for a checkpoint whose checksums were right."""

    def look() -> None:
        manifest, there = _read_manifest(path, step), _sizes(path)
        for name in manifest.files:
            if name not in there:
                raise DamagedError(f"{name} is missing")
            if there[name] != manifest.sizes.get(name, there[name]):
                raise DamagedError(f"{name} has {there[name]} bytes instead of {manifest.sizes[name]}")

    return patiently(look)


def worst(conditions: list[Condition]) -> Condition:
    """Of the shares of all ranks."""
    for kind in ("damaged", "unreadable"):
        for rank, condition in enumerate(conditions):
            if condition.kind == kind:
                return Condition(kind, f"{condition.reason} (rank {rank})" if len(conditions) > 1 else condition.reason)
    return VALID


def is_unfinished(path: Path) -> bool:
    """Whether a checkpoint in an object store is one that a killed process was writing or removing.

    A store renames nothing: there the manifest is replaced last when writing and removed first when removing.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return all(_is_ours(name) for name in _sizes(path))
    except ValueError:
        return False
    return isinstance(manifest, dict) and manifest.get("kind") == KIND and bool(manifest.get("unfinished"))


def _is_ours(name: str) -> bool:
    return name in (".metadata", "state.json") or (name.startswith("__") and name.endswith(".distcp"))


def patiently(look: Callable[[], None]) -> Condition:
    """What ``look`` finds; where it fails other than by ``DamagedError`` it is tried again."""
    for pause in (*RETRY_AFTER, None):
        try:
            look()
            return VALID
        except DamagedError as error:
            return Condition("damaged", str(error))
        except (OSError, Z2aError) as error:  # of a disk, or of a store
            if pause is None:
                return Condition("unreadable", f"it cannot be read at the moment ({error})")
            time.sleep(pause)
    raise AssertionError


def _read_manifest(path: Path, step: int) -> _Manifest:
    try:
        found = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except GONE:
        raise DamagedError(f"{MANIFEST} is missing") from None
    except ValueError:
        raise DamagedError(f"{MANIFEST} is damaged") from None
    if not isinstance(found, dict) or found.get("kind") != KIND or found.get("unfinished"):
        raise DamagedError(f"{MANIFEST} is damaged or of something unfinished")
    if found.get("key") != str(step):
        raise DamagedError(f"{MANIFEST} is of another step")
    files, sizes = found.get("files"), found.get("sizes", {})
    if not isinstance(files, dict) or not files or not isinstance(sizes, dict):
        raise DamagedError(f"{MANIFEST} lists no files")
    return _Manifest(files, sizes)


def _sizes(path: Path) -> dict[str, int]:
    if isinstance(path, RemotePath):
        return {inner.relative_to(path).as_posix(): size for inner, size in path.sizes().items()}
    with os.scandir(path) as entries:
        return {entry.name: entry.stat().st_size for entry in entries}
