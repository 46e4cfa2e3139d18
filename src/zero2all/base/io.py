"""Atomic writes of files and directories, JSON files, and digests."""

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
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.base.errors import DiskFullError, UsageError, Z2aError, is_disk_full, is_quota_exceeded
from zero2all.base.paths import RemotePath, open_bytes, remove_objects
from zero2all.base.records import Record, decode_json, parse_record
from zero2all.base.units import show_bytes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MANIFEST = "manifest.json"
MAX_FILE_BYTES = 1 << 28  # of a JSON file or a tokenizer
HISTORY_FILE = "history.json"  # of a run: see checkpoint/training_state.py


def sha256_file(path: Path) -> str:
    with open_bytes(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fingerprint(value: Any) -> str:
    """A short stable hash of any JSON-serializable value."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a local path to write a file to; it replaces ``target`` atomically, and only on success."""
    if isinstance(target, RemotePath):
        with staging_dir() as directory:
            yield directory / target.name
            target.put(directory / target.name)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with _unique_suffix() as mark, _name_disk_full(target):
        partial = target.with_name(f".{target.name}.partial-{mark}")
        try:
            yield partial
            _fsync(partial)
            os.replace(partial, target)
            _fsync(target.parent)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def staging_dir() -> Iterator[Path]:
    """A local directory for files to be uploaded to an object store."""
    remove_stale_staging()
    with _unique_suffix() as mark, _name_disk_full(Path(tempfile.gettempdir())):
        directory = Path(tempfile.gettempdir()) / f".z2a.staging-{mark}"
        directory.mkdir(mode=0o700)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@cache
def remove_stale_staging() -> None:
    _remove_leftovers(Path(tempfile.gettempdir()) / "z2a")


@contextmanager
def atomic_dir(target: Path, kind: str) -> Iterator[Path]:
    """Yield a directory to fill; it replaces ``target`` atomically on success and is removed on failure.

    Only the output of an earlier call is ever replaced: a directory with other contents is refused.
    """
    if isinstance(target, RemotePath):
        _clear_remote(target, kind)
        yield target
        return
    target = target.absolute()
    require_replaceable(target, kind)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    with _unique_suffix() as mark, _name_disk_full(target):
        partial = target.with_name(f".{target.name}.partial-{mark}")
        partial.mkdir()
        try:
            yield partial
            for directory, _, names in os.walk(partial):
                for path in (*(Path(directory, name) for name in names), Path(directory)):
                    _fsync(path)
            _swap_into_place(partial, target, mark)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _swap_into_place(partial: Path, target: Path, mark: str) -> None:
    old = target.with_name(f".{target.name}.old-{mark}")
    if target.exists():
        os.rename(target, old)
    os.rename(partial, target)
    _fsync(target.parent)  # the name too must survive a power failure
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _name_disk_full(target: Path) -> Iterator[None]:
    """Name the file in the error of a full disk: few libraries do. For the outside of what cleans up, so that the
    space that is reported free is what the user will find."""
    try:
        yield
    except Exception as error:
        if is_disk_full(error):
            raise disk_full_error(target, error) from error
        raise


def disk_full_error(path: Path | None, cause: BaseException, needed: int | None = None) -> DiskFullError:
    """The error of a write to ``path`` that failed because of ``cause``: where there is too little space, and how much.

    Without a path, no library said which file it was. ``needed`` is the least number of bytes, if known.
    """
    needed = cause.needed if needed is None and isinstance(cause, DiskFullError) else needed
    space = "" if path is None else _space_text(path, is_quota=is_quota_exceeded(cause))
    size = "" if needed is None else f"at least {show_bytes(needed)} are needed"
    details = ", ".join(filter(None, (space, size)))
    reason = f"no space left for {path or 'what was being written'}" + (f": {details}" if details else "")
    error = DiskFullError(f"{reason}; free some there or choose another place, and run the same command again")
    error.reason, error.needed = reason, needed
    return error


def _space_text(path: Path, *, is_quota: bool) -> str:
    """How full the file system of a path is. Empty if that cannot be found out."""
    with suppress(OSError):
        place = next(parent for parent in (path.resolve(), *path.resolve().parents) if parent.exists())
        mount = next(parent for parent in (place, *place.parents) if parent.is_mount())
        status = os.statvfs(place)
        if is_quota:
            return f"the quota of this user on {mount} is used up"
        if status.f_files and not status.f_favail:
            return f"{mount} has no inodes left for another file"
        free, total = (blocks * status.f_frsize for blocks in (status.f_bavail, status.f_blocks))
        return f"{show_bytes(free)} free of {show_bytes(total)} on {mount} is not enough"
    return ""


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems do not sync directories
            raise
    finally:
        os.close(descriptor)


def require_replaceable(target: Path, kind: str) -> None:
    """Raise if ``target`` contains anything that ``atomic_dir`` did not create, since it would be replaced."""
    if manifest_kind(target) == kind:
        return
    if isinstance(target, RemotePath):
        taken = bool(target.objects())
    else:
        taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if taken:
        raise UsageError(f"{target} contains something else, not {kind}; choose another directory, or empty it")


def _clear_remote(target: RemotePath, kind: str) -> None:
    """Remove the old objects. An object store cannot rename, so output is complete once its final manifest is there."""
    require_replaceable(target, kind)
    write_json(target / MANIFEST, {"kind": kind, "unfinished": True})
    remove_objects([path for path in target.objects() if path != target / MANIFEST])


@contextmanager
def _unique_suffix() -> Iterator[str]:
    """A suffix for a partial file that names its writer, unique across hosts and containers."""
    mark = f"{host_id()}-{os.getpid()}-{secrets.token_hex(4)}"
    _live_suffixes.add(mark)
    try:
        yield mark
    finally:
        _live_suffixes.discard(mark)


_live_suffixes: set[str] = set()
_SUFFIX_PATTERN = re.compile(r"-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{8}$")
ABANDONED_SECONDS = 86400.0  # after which partial files of another host count as abandoned


@cache
def host_id() -> str:
    """Identifies the scope of process ids: this boot of this machine, and this container."""
    known = [socket.gethostname()]
    for place, read in (("/proc/sys/kernel/random/boot_id", Path.read_text), ("/proc/self/ns/pid", os.readlink)):
        with suppress(OSError):
            known.append(str(read(Path(place))))
    return fingerprint(known)[:8]


def _remove_leftovers(target: Path) -> None:
    """Remove directories beside ``target`` that a killed process left partially written or removed."""
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.*-*"):
        if not _is_abandoned(leftover):
            continue
        if leftover.name.startswith(f".{target.name}.old-") and not target.exists():
            leftover.rename(target)  # killed between two renames
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def _is_abandoned(leftover: Path) -> bool:
    if leftover.is_symlink() or _is_planted(leftover):
        return False
    match = _SUFFIX_PATTERN.search(leftover.name)
    if match is not None and match["host"] == host_id():
        return not is_process_alive(int(match["pid"])) or (
            int(match["pid"]) == os.getpid() and match[0].removeprefix("-") not in _live_suffixes
        )
    try:
        newest = max(path.stat().st_mtime for path in (leftover, *leftover.rglob("*")))
    except OSError:  # somebody is at work there
        return False
    return time.time() - newest > ABANDONED_SECONDS


def _is_planted(path: Path) -> bool:
    """Whether another user put it into a directory in which everybody can, such as ``/tmp``."""
    try:
        return bool(path.parent.stat().st_mode & stat.S_ISVTX) and path.lstat().st_uid != os.getuid()
    except OSError:
        return True


def is_process_alive(pid: int) -> bool:
    """Whether a process of this host runs. The pid may come from an untrusted file name."""
    if pid <= 0:  # kill() would address a process group
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def manifest_kind(directory: Path) -> str | None:
    """The kind in a directory's manifest; None without a readable manifest."""
    try:
        kind: str = decode_json((directory / MANIFEST).read_text(encoding="utf-8"))["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kind


def write_text(target: Path, text: str) -> None:
    with atomic_path(target) as partial:
        partial.write_text(text, encoding="utf-8")


def json_text(value: Any) -> str:
    """The text of a JSON file."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_json(target: Path, value: Any) -> None:
    write_text(target, json_text(value))


def check_regular(path: Path, most: int | None = None) -> None:
    """Raise unless a file that may come from elsewhere is a regular one, of up to ``most`` bytes.

    To read a pipe or a device may take for ever.
    """
    if isinstance(path, RemotePath):
        return
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise Z2aError(f"{path} is not a regular file")
    if most is not None and found.st_size > most:
        raise Z2aError(f"{path} has {show_bytes(found.st_size)}; at most {show_bytes(most)} are read")


def read_regular(path: Path, most: int = MAX_FILE_BYTES) -> bytes:
    """The bytes of a file that may come from elsewhere, such as the directory of a model."""
    check_regular(path, most)
    return path.read_bytes()


def read_json(path: Path) -> Any:
    try:
        return decode_json(read_regular(path).decode("utf-8"))
    except ValueError as error:  # invalid JSON or UTF-8
        raise Z2aError(f"{path} is damaged ({error}); remove it and run the stage again") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file from elsewhere that has to hold an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise Z2aError(f"{path} is damaged: it holds no JSON object")
    return value


def read_record(record: type[Record], path: Path) -> Record:
    """Read a JSON file as a dataclass."""
    return parse_record(record, read_json(path), path)


def write_record(target: Path, record: DataclassInstance) -> None:
    """Write a dataclass as a JSON file."""
    write_json(target, asdict(record))
