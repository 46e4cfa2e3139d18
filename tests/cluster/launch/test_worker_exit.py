"""A rank exits with the status of its program, whatever native code does at exit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
