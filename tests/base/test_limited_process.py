"""A child process for untrusted input does not outlive the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

BUSY = """
import re

def main(connection):
    connection.send_bytes(b"started")
    re.match(r"(a+)+$", "a" * 60 + "b")  # for years, without a moment for another thread
"""
START = """
import sys, time
from pathlib import Path
from zero2all.base.limited_process import LimitedProcess

child = LimitedProcess(Path(sys.argv[1]), (), 60, 1 << 30)
child.connection.recv_bytes()
print(child.pid, flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel signals a closed pipe")
@pytest.mark.timeout(120)
def test_a_busy_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "busy.py"
    program.write_text(BUSY)
    parent = subprocess.Popen([sys.executable, "-c", START, str(program)], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    try:
        assert is_running(pid)
        parent.kill()
        parent.communicate()
        end = time.monotonic() + 20
        while is_running(pid) and time.monotonic() < end:
            time.sleep(0.05)
        assert not is_running(pid)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
