"""Start a process that has imported torch already, and find the processes that a test has started, by their mark."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from zero2all.base.processes import watch_parent
from zero2all.bench.rank_harness import PRELOADED

MARK = "Z2A_TEST_MARK"
SECONDS = 120.0  # agents of Ray look for their cluster for a minute


def marked(mark: str) -> dict[int, str]:
    """Processes that were started with ``Z2A_TEST_MARK=<mark>``, by pid, with their command lines."""
    found, wanted = {}, f"{MARK}={mark}".encode()
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (directory / "environ").read_bytes().split(b"\0"):
                found[int(directory.name)] = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except (OSError, UnicodeDecodeError):
            continue  # it has just ended
    return found


def gone(mark: str) -> None:
    """Wait until none is left."""
    deadline = time.monotonic() + SECONDS
    while left := marked(mark):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def run_preloaded(program: str, *words: str, seconds: float = 240.0) -> subprocess.CompletedProcess[str]:
    """As ``python -c PROGRAM WORDS``, in a process that is forked from one that has imported what trains a model.

    What it does is of interest and not how it starts: the imports would take longer than most programs of tests.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as directory:
        job = (program, words, dict(os.environ), directory)
        process = context.Process(target=_run_program, args=job, daemon=False)
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(program, seconds)
        outputs = [Path(directory, name).read_text(encoding="utf-8") for name in ("stdout", "stderr")]
    assert process.exitcode is not None
    return subprocess.CompletedProcess(["-c", *words], process.exitcode, *outputs)


def _run_program(program: str, words: tuple[str, ...], environment: dict[str, str], directory: str) -> None:
    watch_parent()
    gc.freeze()  # what was imported before the fork
    os.environ.clear()  # of the first call
    os.environ.update(environment)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(directory, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    sys.argv = ["-c", *words]
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
