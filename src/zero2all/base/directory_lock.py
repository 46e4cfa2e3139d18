"""One process in a directory at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from zero2all.base.console import sanitize, say, warn
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import host_id, is_process_alive
from zero2all.base.paths import RemotePath
from zero2all.base.records import decode_json, parse_record
from zero2all.base.redact import redact

NO_FLOCK_ERRNOS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
LOCK_HEARTBEAT_INTERVAL = 15.0  # seconds between two heartbeats of a holder
MAX_COMMAND_CHARACTERS = 200
TELL_AFTER = 2.0  # seconds of waiting before the user hears of it
STALE_AFTER = 120.0  # seconds without a heartbeat after which a holder is dead


@dataclass(frozen=True)
class LockUser:
    """What takes a lock, as messages call it."""

    name: str
    directory: Path
    """What the lock is for; the lock file may be somewhere else."""
    option: str
    """How the user chooses another directory."""


@contextmanager
def lock_output(out: Path, stage: str) -> Iterator[None]:
    """One process at a time writes the output of a stage; others wait for it.

    The lock is beside the output, since a stage replaces its output as a whole. Object stores have no locks, and
    where nothing can be written no lock is needed.
    """
    place = out.with_name(f".{out.name}.lock")
    if isinstance(out, RemotePath) or not _is_writable(place):
        yield
        return
    with lock_directory(place, LockUser(stage, out, "out"), patience=math.inf, leave=False):
        yield


def _is_writable(directory: Path) -> bool:
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return os.access(existing, os.W_OK)


@contextmanager
def lock_directory(place: Path, user: LockUser, patience: float, *, leave: bool = True) -> Iterator[None]:
    """Hold the lock in the directory ``place``, or raise if it is still taken after ``patience`` seconds.

    The kernel releases the lock when the process dies, so it is never stale. Where the file system has no such locks
    (Lustre without ``-o flock``), an exclusively created file replaces it. ``leave``: whether the directory stays.
    """
    path, held = place / "lock", list[int]()

    def acquire() -> bool:
        place.mkdir(parents=True, exist_ok=True)
        if (descriptor := _flock(path)) is not None:
            held.append(descriptor)
        return bool(held)

    try:
        _wait_for_lock(acquire, patience, user, lambda: _describe_holder(_read(path)))
    except OSError as error:
        if error.errno not in NO_FLOCK_ERRNOS:
            raise
        with _exclusive_file(place, user, patience, error):
            yield
        return
    [descriptor] = held
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _own_identity(), 0)
        yield
    finally:
        os.ftruncate(descriptor, 0)
        if not leave:
            with suppress(OSError):  # before the lock is released: a waiter sees that its file is gone, and makes one
                path.unlink()
                place.rmdir()
        os.close(descriptor)


def _wait_for_lock(acquire: Callable[[], bool], patience: float, user: LockUser, holder: Callable[[], str]) -> None:
    start = time.monotonic()
    deadline, is_told = start + patience, False
    while not acquire():
        if patience > TELL_AFTER and not is_told and time.monotonic() - start > TELL_AFTER:
            say(f"waiting for another {user.name} in {user.directory} ({holder()})")
            is_told = True
        if time.monotonic() > deadline:
            raise UsageError(
                f"another {user.name} works in {user.directory} ({holder()}): wait for it, stop it, or give "
                f"this one another directory ({user.option})"
            )
        time.sleep(0.1)


def _flock(path: Path) -> int | None:
    """The descriptor of the locked file; None if it is held, or was removed by its holder in the meantime."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()[:4096]
    except OSError:
        return b""


@contextmanager
def _exclusive_file(place: Path, user: LockUser, patience: float, reason: OSError) -> Iterator[None]:
    path = place / "lock.held"
    warn(
        f"{place} is on a file system without file locks ({reason.strerror}): {path} marks it as taken; "
        f"if a {user.name} was killed and the next one fails, remove that file (or mount with -o flock)"
    )
    claim = _LockFile(path, user.name)
    _wait_for_lock(
        claim.acquire, patience, user, lambda: f"{_describe_holder(claim.read())}; if it is gone, remove {path}"
    )
    stop = threading.Event()
    heartbeat = threading.Thread(target=claim.keep_alive, args=(stop,), name="z2a-lock", daemon=True)
    heartbeat.start()
    try:
        yield
    finally:
        stop.set()
        heartbeat.join()
        claim.release()


class _LockFile:
    """A lock file, created exclusively; one whose holder is dead, or sends no heartbeat, is taken over."""

    def __init__(self, path: Path, user: str) -> None:
        self.path, self._user = path, user
        self._token = secrets.token_hex(8)
        self._identity = _own_identity(self._token)
        self._seen: tuple[_LockSnapshot, float] | None = None  # the file at the last check, unchanged since when

    def acquire(self) -> bool:
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            with suppress(FileNotFoundError):
                stale = _snapshot(self.path)
                if self._is_stale(stale):
                    self._remove(stale)
            return False
        with open(descriptor, "wb") as stream:
            stream.write(self._identity)
        return True

    def read(self) -> bytes:
        return _read(self.path)

    def keep_alive(self, stop: threading.Event) -> None:
        while not stop.wait(LOCK_HEARTBEAT_INTERVAL):
            with suppress(OSError), open(self.path, "rb") as stream:
                if stream.read() != self._identity:
                    warn(
                        f"another {self._user} has taken {self.path}, since this one sent no heartbeat: "
                        "stop one of them"
                    )
                    return
                os.utime(stream.fileno())  # of the file that was read, even if it was replaced since

    def release(self) -> None:
        """Remove the file unless another holder has taken it over."""
        if self.read() == self._identity:
            self.path.unlink(missing_ok=True)

    def _is_stale(self, snapshot: _LockSnapshot) -> bool:
        """Measure age by our own clock: the clocks of two hosts may differ."""
        if self._seen is None or self._seen[0] != snapshot:
            self._seen = (snapshot, time.monotonic())
        return _is_dead(snapshot.identity) or time.monotonic() - self._seen[1] > STALE_AFTER

    def _remove(self, stale: _LockSnapshot) -> None:
        """Several processes may do this, and one may hold the lock by now: then the moved file is not the stale one."""
        moved = self.path.with_name(f"{self.path.name}.{self._token}")
        os.rename(self.path, moved)
        if _snapshot(moved) != stale:
            with suppress(FileExistsError):
                os.link(moved, self.path)
        moved.unlink()


@dataclass(frozen=True)
class _LockSnapshot:
    identity: bytes
    touched: int


def _snapshot(path: Path) -> _LockSnapshot:
    with open(path, "rb") as stream:
        return _LockSnapshot(stream.read(), os.fstat(stream.fileno()).st_mtime_ns)


@dataclass(frozen=True)
class LockHolder:
    pid: int
    host: str
    host_id: str = ""
    command: str = ""
    token: str = ""
    """Tells holders apart where a file that was created exclusively is the lock."""


def _own_identity(token: str = "") -> bytes:
    identity = asdict(LockHolder(os.getpid(), socket.gethostname(), host_id(), _own_command(), token))
    return json.dumps({name: value for name, value in identity.items() if value}).encode()


def _own_command() -> str:
    return redact(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]))[:MAX_COMMAND_CHARACTERS]


def _is_dead(identity: bytes) -> bool:
    """Whether the holder has ended, which is known only for a process of this host."""
    holder = _parse_identity(identity)
    return holder is not None and holder.host_id == host_id() and not is_process_alive(holder.pid)


def _describe_holder(identity: bytes) -> str:
    holder = _parse_identity(identity)
    if holder is None:
        return "unknown process"
    return f"process {holder.pid} on {holder.host}" + (f": {sanitize(holder.command)}" if holder.command else "")


def _parse_identity(identity: bytes) -> LockHolder | None:
    try:
        return parse_record(LockHolder, decode_json(identity), "lock")
    except (ValueError, Z2aError):
        return None
