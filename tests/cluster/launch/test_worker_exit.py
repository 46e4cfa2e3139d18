"""A rank exits with the status of its program, and of its log only the end is read: it does not fill the disk."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from zero2all.cluster.launch.failure_report import HEAD_BYTES, TAIL_BYTES, last_lines, trim_log

# Like a native thread that outlives the interpreter: the process aborts at exit.
ABORTS_AT_EXIT = """
import atexit, ctypes, sys
from zero2all.cluster.launch.worker import run_worker
libc = ctypes.CDLL(None)
handler = ctypes.CFUNCTYPE(None)(libc.abort)
libc.__cxa_atexit(ctypes.cast(handler, ctypes.c_void_p), None, None)
atexit.register(lambda: print("exit handlers ran"))
def program():
    print("done")
    if sys.argv[1] == "raises":
        raise ValueError("on purpose")
    if sys.argv[1] == "exits":
        sys.exit(7)
    return int(sys.argv[1])
run_worker(program)
"""


@pytest.mark.parametrize(("word", "status"), [("0", 0), ("3", 3), ("exits", 7), ("raises", 1)])
def test_a_rank_ends_with_the_status_of_its_program(tmp_path: Path, word: str, status: int) -> None:
    agent = {"Z2A_AGENT_DIR": str(tmp_path), "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    environment = {**os.environ, **agent, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", ABORTS_AT_EXIT, word], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines() == ["done", "exit handlers ran"]
    assert ("ValueError: on purpose" in done.stderr) == (word == "raises")


TEXT = b"one\ntwo\nthr\xffee\n"


def used(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_of_a_large_log_only_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    with open(log, "wb") as stream:
        stream.seek(1 << 30)
        stream.write(b"\n" + TEXT)
    tracemalloc.start()
    try:
        assert last_lines(log, 2) == ["two", "thr\ufffdee"]
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert last_lines(tmp_path / "none", 2) == []
    log.write_bytes(b"")
    assert last_lines(log, 2) == []


def test_a_log_that_grows_keeps_its_head_and_its_tail(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    with open(log, "wb", buffering=0) as rank:  # as a rank has it open, which continues to write
        rank.write(b"the first line\n")
        for _ in range(24):
            rank.write(b"x" * ((1 << 20) - 1) + b"\n")
        rank.write(b"a line near the end\n")
        os.fsync(rank.fileno())
        if not trim_log(log):
            pytest.skip("this file system cannot give back a part of a file")
        assert used(log) <= HEAD_BYTES + TAIL_BYTES + (1 << 20)
        rank.write(b"and one after it\n")
    assert last_lines(log, 2) == ["a line near the end", "and one after it"]
    with open(log, "rb") as stream:
        assert stream.readline() == b"the first line\n"


def test_a_small_log_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    log.write_bytes(TEXT)
    assert not trim_log(log)
    assert log.read_bytes() == TEXT
    assert not trim_log(tmp_path / "none")
