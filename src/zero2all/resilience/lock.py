"""One trainer in a run directory at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.console import warn
from zero2all.errors import UsageError
from zero2all.io import host_id, is_alive
from zero2all.resilience.beat import has_agent

PATIENCE = 5.0  # seconds: ranks that start again may meet the last moments of those they replace
OF_AGENTS = 180.0  # a node that was cut off from the others holds on until its own agent notices
NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
BEAT = 15.0  # seconds between two signs of life of a holder
STALE = 120.0  # seconds without one after which it is gone


@contextmanager
def locked(directory: Path, patience: float | None = None) -> Iterator[None]:
    """Hold ``directory``. The system lets go when the process dies, however it dies, so no lock is ever stale.

    Where the file system has no such locks (Lustre without ``-o flock``), a file that is created exclusively stands in.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if patience is None:
        patience = OF_AGENTS if has_agent() else PATIENCE
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            _wait(lambda: _flock(descriptor), patience, directory, lambda: _holder(os.pread(descriptor, 4096, 0)))
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            with _exclusive_file(directory, patience, error):
                yield
            return
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _own_name(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _wait(take: Callable[[], bool], patience: float, directory: Path, holder: Callable[[], str]) -> None:
    deadline = time.monotonic() + patience
    while not take():
        if time.monotonic() > deadline:
            raise UsageError(
                f"another trainer works in {directory} ({holder()}): wait for it, stop it, or give "
                "this one a new place (out=DIR)"
            )
        time.sleep(0.1)


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _exclusive_file(directory: Path, patience: float, reason: OSError) -> Iterator[None]:
    path = directory / "lock.held"
    warn(
        f"{directory} is on a file system without file locks ({reason.strerror}): {path} marks the run as taken; "
        "if a trainer was killed and another is refused, remove that file (or mount with -o flock)"
    )
    claim = _Claim(path)
    _wait(claim.take, patience, directory, lambda: f"{_holder(claim.read())}; if it is gone, remove {path}")
    stop = threading.Event()
    beat = threading.Thread(target=claim.give_signs, args=(stop,), name="z2a-lock", daemon=True)
    beat.start()
    try:
        yield
    finally:
        stop.set()
        beat.join()
        claim.release()


class _Claim:
    """Tries to create the file; one whose holder is dead, or gave no sign of life while we looked, is taken over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._token = secrets.token_hex(8)
        self._name = _own_name(self._token)
        self._seen: tuple[_Look, float] | None = None  # the file at our last look, and since when it is like that

    def take(self) -> bool:
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            with suppress(FileNotFoundError):
                stale = _look(self.path)
                if self._is_stale(stale):
                    self._remove(stale)
            return False
        with open(descriptor, "wb") as stream:
            stream.write(self._name)
        return True

    def read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError:
            return b""

    def give_signs(self, stop: threading.Event) -> None:
        while not stop.wait(BEAT):
            with suppress(OSError), open(self.path, "rb") as stream:
                if stream.read() != self._name:
                    warn(
                        f"another trainer has taken {self.path}, since this one gave no sign of life: stop one of them"
                    )
                    return
                os.utime(stream.fileno())  # of the file that was read, whatever has its name by now

    def release(self) -> None:
        """One that was taken over belongs to another."""
        if self.read() == self._name:
            self.path.unlink(missing_ok=True)

    def _is_stale(self, look: _Look) -> bool:
        """By our own clock alone: those of two hosts may differ."""
        if self._seen is None or self._seen[0] != look:
            self._seen = (look, time.monotonic())
        return _is_dead(look.name) or time.monotonic() - self._seen[1] > STALE

    def _remove(self, stale: _Look) -> None:
        """Several may come to this, and one of them may hold the run by now: then what was moved is not what we saw."""
        moved = self.path.with_name(f"{self.path.name}.{self._token}")
        os.rename(self.path, moved)
        if _look(moved) != stale:
            with suppress(FileExistsError):
                os.link(moved, self.path)
        moved.unlink()


@dataclass(frozen=True)
class _Look:
    name: bytes
    touched: int


def _look(path: Path) -> _Look:
    with open(path, "rb") as stream:
        return _Look(stream.read(), os.fstat(stream.fileno()).st_mtime_ns)


def _own_name(token: str = "") -> bytes:
    name = {"pid": os.getpid(), "host": socket.gethostname(), "host_id": host_id()}
    return json.dumps(name | ({"token": token} if token else {})).encode()


def _is_dead(name: bytes) -> bool:
    """Only of a process of this host can that be known."""
    holder = _parsed(name)
    if holder.get("host_id") != host_id() or not isinstance(holder.get("pid"), int):
        return False
    return not is_alive(holder["pid"])


def _holder(name: bytes) -> str:
    holder = _parsed(name)
    return f"process {holder['pid']} on {holder['host']}" if {"pid", "host"} <= set(holder) else "it does not say which"


def _parsed(name: bytes) -> dict[str, Any]:
    try:
        found = json.loads(name)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
