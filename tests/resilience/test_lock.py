"""One trainer at a time, also where the file system has no locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import threading
from pathlib import Path

import pytest

import zero2all.resilience.lock as lock
from zero2all.errors import UsageError
from zero2all.resilience import locked


@pytest.fixture(params=[errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def no_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("no_flock")
def test_without_file_locks_a_file_stands_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(tmp_path, patience=0.2):
        said = capsys.readouterr().err
        assert "without file locks" in said
        assert "lock.held" in said
        wanted = f"process {os.getpid()} on .*; if it is gone, remove .*lock.held"
        with pytest.raises(UsageError, match=wanted), locked(tmp_path, patience=0.2):
            pass
        assert (tmp_path / "lock.held").exists()  # the one who was refused did not take it away
    with locked(tmp_path, patience=0.2):
        pass
    assert not (tmp_path / "lock.held").exists()


@pytest.mark.usefixtures("no_flock")
def test_a_dead_holder_of_this_host_does_not_keep_the_run(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    holder = {"pid": gone.pid, "host": "here", "host_id": lock.host_id()}
    (tmp_path / "lock.held").write_text(json.dumps(holder))
    with locked(tmp_path, patience=1):
        pass


@pytest.mark.parametrize("no_flock", [errno.ENOSYS], indirect=True)
def test_an_impossible_process_id_in_the_file_is_a_dead_holder(tmp_path: Path, no_flock: None) -> None:
    (tmp_path / "lock.held").write_text(json.dumps({"pid": 10**20, "host": "here", "host_id": lock.host_id()}))
    with locked(tmp_path, patience=60):
        pass


@pytest.mark.parametrize("no_flock", [errno.ENOSYS], indirect=True)
def test_a_holder_on_another_host_is_judged_by_its_signs_of_life(
    tmp_path: Path, no_flock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(lock, "STALE", 0.5)
    (tmp_path / "lock.held").write_text(json.dumps({"pid": gone.pid, "host": "there", "host_id": "0badcafe"}))
    stop = threading.Event()

    def beat() -> None:
        stamp = 1000
        while not stop.wait(0.01):
            stamp += 1
            os.utime(tmp_path / "lock.held", (stamp, stamp))  # its clock is years behind

    alive = threading.Thread(target=beat)
    alive.start()
    try:
        with pytest.raises(UsageError, match="on there"), locked(tmp_path, patience=1.5):
            pass
    finally:
        stop.set()
        alive.join()
    with locked(tmp_path, patience=60):
        pass


def test_a_holder_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.01)
    seen = threading.Event()
    monkeypatch.setattr(lock.os, "utime", lambda path: seen.set())

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path):
        assert seen.wait(60)


def test_other_errors_of_a_lock_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="Input/output error"), locked(tmp_path):
        pass
