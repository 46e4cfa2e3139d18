"""One trainer at a time, also where the file system has no locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import zero2all.base.directory_lock as lock
from zero2all.base.errors import UsageError
from zero2all.checkpoint import run_lock

HOLD = """
import sys, time
from pathlib import Path
from zero2all.base.directory_lock import LockUser, lock_directory  # as run_lock does, which imports torch
with lock_directory(Path(sys.argv[1]), LockUser("trainer", Path(sys.argv[1]), ""), 5.0):
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_trainers_in_one_run_are_refused_and_a_dead_one_is_not(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        refused = pytest.raises(UsageError, match=f"another trainer works in .* \\(process {holder.pid} on ")
        with refused, run_lock(tmp_path, patience=0.2):
            pass
    finally:
        holder.kill()
        holder.wait()
    with run_lock(tmp_path, patience=0.2):
        pass


def refuse_flock(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.fixture(params=[errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def no_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_flock(request.param, monkeypatch)


@pytest.mark.usefixtures("no_flock")
def test_without_file_locks_an_exclusive_file_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_lock(tmp_path, patience=0.2):
        said = capsys.readouterr().err
        assert "without file locks" in said
        assert "lock.held" in said
        wanted = f"process {os.getpid()} on .*; if it is gone, remove .*lock.held"
        with pytest.raises(UsageError, match=wanted), run_lock(tmp_path, patience=0.2):
            pass
        assert (tmp_path / "lock.held").exists()  # the refused trainer did not remove it
    with run_lock(tmp_path, patience=0.2):
        pass
    assert not (tmp_path / "lock.held").exists()


def dead_process() -> int:
    gone = subprocess.Popen(["true"])
    gone.wait()
    return gone.pid


@pytest.mark.usefixtures("no_flock")
@pytest.mark.parametrize("pid", [None, 10**20], ids=["ended", "impossible"])
def test_a_dead_holder_of_this_host_does_not_keep_the_run(pid: int | None, tmp_path: Path) -> None:
    holder = {"pid": pid or dead_process(), "host": "here", "host_id": lock.host_id()}
    (tmp_path / "lock.held").write_text(json.dumps(holder))
    with run_lock(tmp_path, patience=1 if pid is None else 60):
        pass


@pytest.mark.parametrize("no_flock", [errno.ENOSYS], indirect=True)
def test_a_holder_on_another_host_is_judged_by_its_heartbeats(
    tmp_path: Path, no_flock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "STALE_AFTER", 1.5)
    (tmp_path / "lock.held").write_text(json.dumps({"pid": dead_process(), "host": "there", "host_id": "0badcafe"}))
    stop = threading.Event()

    def heartbeat() -> None:
        stamp = 1000
        while not stop.wait(0.01):
            stamp += 1
            os.utime(tmp_path / "lock.held", (stamp, stamp))  # its clock is years behind

    alive = threading.Thread(target=heartbeat)
    alive.start()
    try:
        with pytest.raises(UsageError, match="on there"), run_lock(tmp_path, patience=2):
            pass
    finally:
        stop.set()
        alive.join()
    with run_lock(tmp_path, patience=60):
        pass


def test_a_holder_sends_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LOCK_HEARTBEAT_INTERVAL", 0.01)
    seen = threading.Event()
    monkeypatch.setattr(lock.os, "utime", lambda path: seen.set())

    refuse_flock(errno.ENOSYS, monkeypatch)
    with run_lock(tmp_path):
        assert seen.wait(60)


def test_other_errors_of_a_lock_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_flock(errno.EIO, monkeypatch)
    with pytest.raises(OSError, match="Input/output error"), run_lock(tmp_path):
        pass


def other_holder(path: Path) -> str:
    """Takes the lock over, as a trainer does that saw no heartbeat of the holder."""
    path.unlink(missing_ok=True)
    path.write_text(json.dumps({"pid": 1, "host": "there", "host_id": "0badcafe", "token": "other"}))
    os.utime(path, (1000, 1000))
    return path.read_text()


@pytest.mark.parametrize("no_flock", [errno.ENOSYS], indirect=True)
def test_a_holder_that_was_replaced_leaves_the_file_to_its_successor(
    tmp_path: Path, no_flock: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped for minutes (a paused machine), it resumes and finds another trainer."""
    held = tmp_path / "lock.held"
    monkeypatch.setattr(lock, "LOCK_HEARTBEAT_INTERVAL", 0.01)
    with run_lock(tmp_path, patience=60):
        successor = other_holder(tmp_path / "new")
        os.rename(tmp_path / "new", held)
        for thread in threading.enumerate():
            if thread.name == "z2a-lock":
                thread.join(60)  # it ends when it sees the other
    assert held.read_text() == successor
    assert held.stat().st_mtime == 1000
    assert "another trainer has taken" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["replaced", "refreshed"])
def test_a_lock_that_changes_hands_while_it_is_removed_is_put_back(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, rename = tmp_path / "lock.held", os.rename
    monkeypatch.setattr(lock, "STALE_AFTER", -1.0)
    first = other_holder(held).replace("other", "stale")
    held.write_text(first)

    def late(source: Path, target: Path) -> None:
        if change == "replaced":
            other_holder(held)
        else:
            os.utime(held, (2000, 2000))
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    assert not lock._LockFile(held, "trainer").acquire()
    assert [path.name for path in tmp_path.iterdir()] == ["lock.held"]
    assert held.read_text() == (first if change == "refreshed" else first.replace("stale", "other"))
    monkeypatch.setattr(os, "rename", rename)
    claim = lock._LockFile(held, "trainer")
    assert not claim.acquire()
    assert not held.exists()
    assert claim.acquire()
