"""Integrity of a checkpoint: its manifest and the checksums of its files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zero2all.base.errors import Z2aError
from zero2all.base.io import MANIFEST, sha256_file
from zero2all.base.paths import RemotePath
from zero2all.base.records import decode_json, parse_record

MANIFEST_KIND = "checkpoint"
RETRY_DELAYS = (0.5, 2.0)  # seconds: a file server usually recovers from a glitch by then
MISSING_FILE_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


IntegrityKind = Literal["valid", "damaged", "unreadable"]


@dataclass(frozen=True)
class IntegrityResult:
    """``damaged``: the data is wrong, permanently. ``unreadable``: unknown, so nothing may be removed for it."""

    kind: IntegrityKind
    reason: str = ""


VALID = IntegrityResult("valid")


class DamagedError(Exception):
    """The data read is wrong; a retry would not help."""


@dataclass(frozen=True)
class CheckpointManifest:
    """``manifest.json``: what ``write_manifest`` writes, or the mark of something unfinished in an object store."""

    kind: str
    key: str = ""
    """The step."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file."""
    sizes: dict[str, int] = field(default_factory=dict)
    etags: dict[str, str] = field(default_factory=dict)
    """The name that an object store gave each upload."""
    unfinished: bool = False


def verify_checksums(
    path: Path, step: int, rank_slice: tuple[int, int] = (0, 1), only: str | None = None
) -> IntegrityResult:
    """Recompute the checksums. Rank r of R checks every R-th file from r on: all ranks together read each file once.

    With ``only``, the checksum of that file alone. An object whose ETag is still the one of its upload has not changed,
    and is not downloaded to be hashed.
    """

    def check() -> None:
        manifest, (sizes, etags) = _read_manifest(path, step), _sizes_and_etags(path)
        unchanged = {name for name, etag in manifest.etags.items() if etags.get(name) == etag}
        for name, recorded in _slice(manifest.files, rank_slice).items():
            _check_size(name, sizes, manifest)
            if name in unchanged or name != (only or name):
                continue
            try:
                digest = sha256_file(path / name)
            except MISSING_FILE_ERRORS:
                raise DamagedError(f"{name} is missing") from None
            if digest != recorded:
                raise DamagedError(f"{name} does not match its checksum")

    return check_with_retries(check)


def read_checksums(path: Path, step: int, rank_slice: tuple[int, int] = (0, 1)) -> dict[str, str]:
    """The recorded checksums of the same files."""
    return _slice(_read_manifest(path, step).files, rank_slice)


def _slice(files: dict[str, str], rank_slice: tuple[int, int]) -> dict[str, str]:
    rank, world_size = rank_slice
    return {name: files[name] for name in sorted(files)[rank::world_size]}


def verify_sizes(path: Path, step: int) -> IntegrityResult:
    """Check only that the manifest and every file exist, with their sizes: for a checkpoint verified before."""

    def check() -> None:
        manifest, (sizes, _) = _read_manifest(path, step), _sizes_and_etags(path)
        for name in manifest.files:
            _check_size(name, sizes, manifest)

    return check_with_retries(check)


def _check_size(name: str, sizes: dict[str, int], manifest: CheckpointManifest) -> None:
    if name not in sizes:
        raise DamagedError(f"{name} is missing")
    if sizes[name] != manifest.sizes.get(name, sizes[name]):
        raise DamagedError(f"{name} has {sizes[name]} bytes instead of {manifest.sizes[name]}")


def worst_result(results: Sequence[IntegrityResult]) -> IntegrityResult:
    """The worst of the results of all ranks."""
    for kind in ("damaged", "unreadable"):
        for rank, result in enumerate(results):
            if result.kind == kind:
                return IntegrityResult(kind, f"{result.reason} (rank {rank})" if len(results) > 1 else result.reason)
    return VALID


def is_unfinished(path: Path) -> bool:
    """Return whether a killed process was writing or removing this checkpoint in an object store.

    An object store cannot rename: there the manifest is replaced last when writing and removed first when removing.
    """
    try:
        manifest = read_manifest_of_checkpoint(path)
    except FileNotFoundError:
        return all(_is_checkpoint_file(name) for name in _sizes_and_etags(path)[0])
    except DamagedError:
        return False
    return manifest.kind == MANIFEST_KIND and manifest.unfinished


def _is_checkpoint_file(name: str) -> bool:
    return name in (".metadata", "state.json", "chunks.parquet") or (name.startswith("__") and name.endswith(".distcp"))


def check_with_retries(check: Callable[[], None]) -> IntegrityResult:
    """The result of ``check``; errors other than ``DamagedError`` are retried."""
    for pause in (*RETRY_DELAYS, None):
        try:
            check()
            return VALID
        except DamagedError as error:
            return IntegrityResult("damaged", str(error))
        except (OSError, Z2aError) as error:  # of a disk, or of a store
            if pause is None:
                return IntegrityResult("unreadable", f"it cannot be read at the moment ({error})")
            time.sleep(pause)
    raise AssertionError


def read_manifest_of_checkpoint(path: Path) -> CheckpointManifest:
    """The manifest, whatever it says. Raises if there is none, or a damaged one."""
    data = (path / MANIFEST).read_bytes()  # a failed read is no damage
    try:
        return parse_record(CheckpointManifest, decode_json(data), MANIFEST)
    except (ValueError, Z2aError):
        raise DamagedError(f"{MANIFEST} is damaged") from None


def _read_manifest(path: Path, step: int) -> CheckpointManifest:
    try:
        manifest = read_manifest_of_checkpoint(path)
    except MISSING_FILE_ERRORS:
        raise DamagedError(f"{MANIFEST} is missing") from None
    if manifest.kind != MANIFEST_KIND or manifest.unfinished:
        raise DamagedError(f"{MANIFEST} is damaged or of something unfinished")
    if manifest.key != str(step):
        raise DamagedError(f"{MANIFEST} is of another step")
    if not manifest.files:
        raise DamagedError(f"{MANIFEST} lists no files")
    return manifest


def _sizes_and_etags(path: Path) -> tuple[dict[str, int], dict[str, str]]:
    """The sizes and ETags of the files, from one listing; a local file has no ETag."""
    sizes, etags = dict[str, int](), dict[str, str]()
    if isinstance(path, RemotePath):
        for inner, (size, etag) in path.sizes_and_etags().items():
            name = inner.relative_to(path).as_posix()
            sizes[name] = size
            etags |= {} if etag is None else {name: etag}
        return sizes, etags
    with os.scandir(path) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # a link to nothing
                sizes[entry.name] = entry.stat().st_size
    return sizes, etags
