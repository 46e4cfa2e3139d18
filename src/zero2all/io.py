"""Files written whole or not at all, and the manifest that every stage leaves beside its output."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from zero2all import __version__
from zero2all.errors import DiskFullError, UsageError, Z2aError, is_disk_full
from zero2all.paths import RemotePath, open_bytes

MANIFEST = "manifest.json"


def sha256_file(path: Path) -> str:
    with open_bytes(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fingerprint(value: Any) -> str:
    """A short stable name for any JSON-able value."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Give a local path to write a file to; it becomes ``target`` only on success, and then all of it at once."""
    if isinstance(target, RemotePath):
        with staging() as directory:
            yield directory / target.name
            target.put(directory / target.name)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with _marked() as mark, _room_for(target):
        partial = target.with_name(f".{target.name}.partial-{mark}")
        try:
            yield partial
            _sync(partial)
            os.replace(partial, target)
            _sync(target.parent)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def staging() -> Iterator[Path]:
    """A local directory for what is on its way to an object store."""
    remove_staging_of_the_dead()
    with _marked() as mark, _room_for(Path(tempfile.gettempdir())):
        directory = Path(tempfile.gettempdir()) / f".z2a.staging-{mark}"
        directory.mkdir(mode=0o700)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@cache
def remove_staging_of_the_dead() -> None:
    _remove_leftovers(Path(tempfile.gettempdir()) / "z2a")


@contextmanager
def atomic_dir(target: Path, kind: str) -> Iterator[Path]:
    """Give a directory to fill; it replaces ``target`` whole on success and vanishes on failure.

    Only what an earlier call made is ever replaced: a directory with other things in it is refused.
    """
    if isinstance(target, RemotePath):
        _empty(target, kind)
        yield target
        return
    target = target.absolute()
    refuse_strangers(target, kind)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    with _marked() as mark, _room_for(target):
        partial = target.with_name(f".{target.name}.partial-{mark}")
        partial.mkdir()
        try:
            yield partial
            for directory, _, names in os.walk(partial):
                for path in (*(Path(directory, name) for name in names), Path(directory)):
                    _sync(path)
            _put_in_place(partial, target, mark)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: Path, target: Path, mark: str) -> None:
    old = target.with_name(f".{target.name}.old-{mark}")
    if target.exists():
        os.rename(target, old)
    os.rename(partial, target)
    _sync(target.parent)  # the name too must outlive a power cut
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _room_for(target: Path) -> Iterator[None]:
    """A full disk by the name of what is being written: few libraries say which file it was."""
    try:
        yield
    except Exception as error:
        if is_disk_full(error):
            raise DiskFullError.of(target) from error
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems do not sync directories
            raise
    finally:
        os.close(descriptor)


def refuse_strangers(target: Path, kind: str) -> None:
    """An error if ``target`` holds anything that ``atomic_dir`` did not make, since it would be replaced."""
    if _kind_of(target) == kind:
        return
    if isinstance(target, RemotePath):
        taken = bool(target.objects())
    else:
        taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if taken:
        raise UsageError(f"{target} holds something else than {kind}; choose another directory, or empty it")


def _empty(target: RemotePath, kind: str) -> None:
    """Make room for what comes. An object store renames nothing, so what is whole is what has its final manifest."""
    refuse_strangers(target, kind)
    write_json(target / MANIFEST, {"kind": kind, "unfinished": True})
    for path in target.objects():
        if path != target / MANIFEST:
            path.unlink(missing_ok=True)


@contextmanager
def _marked() -> Iterator[str]:
    """A name for something half-written: who writes it, unlike any other, also of other hosts and containers."""
    mark = f"{host_id()}-{os.getpid()}-{secrets.token_hex(4)}"
    _in_use.add(mark)
    try:
        yield mark
    finally:
        _in_use.discard(mark)


_in_use: set[str] = set()
_MARK = re.compile(r"-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{8}$")
OLD = 86400.0  # seconds after which what another host left half-written is taken for abandoned


@cache
def host_id() -> str:
    """Where a process id means what it means here: this boot of this machine, and this container."""
    known = [socket.gethostname()]
    for place, read in (("/proc/sys/kernel/random/boot_id", Path.read_text), ("/proc/self/ns/pid", os.readlink)):
        with suppress(OSError):
            known.append(str(read(Path(place))))
    return fingerprint(known)[:8]


def _remove_leftovers(target: Path) -> None:
    """Directories beside ``target`` that a killed process left half-written or half-removed."""
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.*-*"):
        if not _is_abandoned(leftover):
            continue
        if leftover.name.startswith(f".{target.name}.old-") and not target.exists():
            leftover.rename(target)  # killed between two renames
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def _is_abandoned(leftover: Path) -> bool:
    found = _MARK.search(leftover.name)
    if found is not None and found["host"] == host_id():
        return not is_alive(int(found["pid"])) or (
            int(found["pid"]) == os.getpid() and found[0].removeprefix("-") not in _in_use
        )
    try:
        newest = max(path.stat().st_mtime for path in (leftover, *leftover.rglob("*")))
    except OSError:  # somebody is at work there
        return False
    return time.time() - newest > OLD


def is_alive(pid: int) -> bool:
    """Whether a process of this host runs. The number may come from a name that anybody can write."""
    if pid <= 0:  # to kill() that is a whole group
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _kind_of(directory: Path) -> str | None:
    """What a directory's manifest says it holds; None without a manifest that can be read."""
    try:
        kind: str = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kind


def write_text(target: Path, text: str) -> None:
    with atomic_path(target) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(target: Path, value: Any) -> None:
    write_text(target, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no UTF-8
        raise Z2aError(f"{path} is damaged ({error}); remove it and run the stage again") from error


def write_manifest(directory: Path, kind: str, body: dict[str, Any]) -> None:
    write_json(directory / MANIFEST, {"kind": kind, "zero2all": __version__, **body})


def read_manifest(directory: Path, kind: str, made_by: str) -> dict[str, Any]:
    """The manifest of a stage's output, or an error that names the command which makes it."""
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


def is_current(directory: Path, kind: str, key: str) -> bool:
    """Whether ``directory`` already holds what a stage with this key would make, byte for byte as recorded."""
    if _kind_of(directory) != kind:
        return False
    manifest = read_json(directory / MANIFEST)
    if manifest.get("key") != key:
        return False
    files: dict[str, str] = manifest.get("files", {})
    return all(
        (directory / name).exists() and sha256_file(directory / name) == digest for name, digest in files.items()
    )


def checksums(directory: Path) -> dict[str, str]:
    """sha256 of every file below ``directory``, by relative path, the manifest itself left out."""
    files = [path for path in all_files(directory) if path.name != MANIFEST]
    return {path.relative_to(directory).as_posix(): sha256_file(path) for path in files}


def all_files(directory: Path) -> list[Path]:
    """Every file below ``directory``, in a fixed order."""
    if isinstance(directory, RemotePath):
        return sorted(directory.objects())
    return sorted(path for path in directory.rglob("*") if path.is_file())
