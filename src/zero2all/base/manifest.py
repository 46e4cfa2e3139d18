"""The manifest that every stage writes beside its output, and whether the output is still as recorded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from zero2all import __version__
from zero2all.base.errors import Z2aError
from zero2all.base.io import MANIFEST, manifest_kind, read_json, sha256_file, write_json
from zero2all.base.paths import RemotePath
from zero2all.base.records import DocumentsManifest, decode_json, parse_record

SAMPLE_BLOCK_BYTES, SAMPLE_BLOCKS = 1 << 16, 16  # 1 MiB of each file


class FinishedRecord(Protocol):
    """The record of a task's output. It is written last, so the output is complete once its record is there."""

    @property
    def key(self) -> str:
        """Fingerprint of everything that the output depends on."""


Finished = TypeVar("Finished", bound=FinishedRecord)


def read_finished(
    record: type[Finished], path: Path, key: str, is_intact: Callable[[Finished], bool] = lambda found: True
) -> Finished | None:
    """The record of output that need not be made again: it has this key, and its files are those recorded.

    None for output without a record, with a damaged one, or without one of its files.
    """
    try:
        data = path.read_bytes()  # outside the inner try: a failing object store does not mean unfinished output
        try:
            found = parse_record(record, decode_json(data), path)
        except (ValueError, Z2aError):
            return None
        return found if found.key == key and is_intact(found) else None
    except FileNotFoundError:
        return None


def write_manifest(directory: Path, kind: str, body: dict[str, Any]) -> None:
    write_json(directory / MANIFEST, {"kind": kind, "zero2all": __version__, **body})


def read_manifest(directory: Path, kind: str, made_by: str) -> dict[str, Any]:
    """The manifest of a stage's output, or an error that names the command that creates it."""
    path = directory / MANIFEST
    if not path.exists():
        raise Z2aError(f"no {kind} in {directory}: make them with '{made_by}'")
    manifest: dict[str, Any] = read_json(path)
    if not isinstance(manifest, dict):
        raise Z2aError(f"{path} is damaged; remove it and run '{made_by}' again")
    if manifest.get("kind") != kind:
        raise Z2aError(f"{directory} holds {manifest.get('kind')}, not {kind}: make them with '{made_by}'")
    if manifest.get("unfinished"):
        raise Z2aError(f"the {kind} in {directory} are not finished: run '{made_by}' again")
    return manifest


def read_documents_manifest(directory: Path) -> DocumentsManifest:
    manifest = read_manifest(directory, "documents", "z2a corpus build RECIPE")
    return parse_record(DocumentsManifest, manifest, directory / MANIFEST)


def is_current(directory: Path, kind: str, key: str, *, verify: bool = False) -> bool:
    """Whether ``directory`` already contains the output of a stage with this key, with its files as recorded.

    Files whose manifest has samples of them are compared as in ``is_intact``, all others by every byte.
    """
    if manifest_kind(directory) != kind:
        return False
    manifest = read_json(directory / MANIFEST)
    if manifest.get("key") != key:
        return False
    files: dict[str, str] = manifest.get("files", {})
    samples: dict[str, str] = manifest.get("samples", {})
    return all(
        (directory / name).exists()
        and is_intact(directory / name, directory / MANIFEST, digest, samples.get(name), verify=verify)
        for name, digest in files.items()
    )


def is_intact(path: Path, recorded_in: Path, sha256: str, sample: str | None, *, verify: bool = False) -> bool:
    """Whether a file is as its record says, which was written after it.

    To hash terabytes again at every rerun takes hours. So a file that is not newer than its record is compared by its
    sample, which includes its size; any other file, or one without a sample, or all with ``verify``, by every byte.
    """
    if verify or sample is None or isinstance(path, RemotePath):
        return sha256_file(path) == sha256
    if path.stat().st_mtime_ns > recorded_in.stat().st_mtime_ns:  # written again, or copied without its time
        return sha256_file(path) == sha256
    return sampled_digest(path) == sample


def sampled_digest(path: Path) -> str:
    """sha256 of a local file's size and of some blocks of it; of all of it, if it is small."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as stream:
        if size <= SAMPLE_BLOCKS * SAMPLE_BLOCK_BYTES:
            digest.update(stream.read())
        else:
            for number in range(SAMPLE_BLOCKS):  # the first, the last, and those in between at equal distances
                stream.seek(number * (size - SAMPLE_BLOCK_BYTES) // (SAMPLE_BLOCKS - 1))
                digest.update(stream.read(SAMPLE_BLOCK_BYTES))
    return digest.hexdigest()


def checksums(directory: Path) -> dict[str, str]:
    """sha256 of every file below ``directory``, by relative path, without the manifest itself."""
    files = [path for path in all_files(directory) if path.name != MANIFEST]
    return {path.relative_to(directory).as_posix(): sha256_file(path) for path in files}


def all_files(directory: Path) -> list[Path]:
    """Every file below ``directory``, in a fixed order."""
    if isinstance(directory, RemotePath):
        return sorted(directory.objects())
    return sorted(path for path in directory.rglob("*") if path.is_file())
