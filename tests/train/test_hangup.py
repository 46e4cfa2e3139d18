"""A terminal that closes stops a run as SIGTERM does: it saves, and the same command resumes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest

from tests.conftest import tiny_recipe
from zero2all.base.processes import hold_back_interrupts, stop_on_signals, stop_signals
from zero2all.recipe import Recipe, recipe_yaml
from zero2all.train import Run
from zero2all.train.signals import stop_requested

SECONDS = 240.0


@contextmanager
def in_terminal(command: list[str]) -> Iterator[tuple[int, int]]:
    """A process with a terminal of its own, as (pid, the other end)."""
    pid, master = pty.fork()
    if pid == 0:
        try:
            os.execv(command[0], command)
        finally:
            os._exit(127)
    Thread(target=_drain, args=(master,), daemon=True).start()
    try:
        yield pid, master
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _drain(master: int) -> None:
    with suppress(OSError):
        while os.read(master, 65536):
            pass


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def exit_status(pid: int) -> int:
    found: list[int] = []

    def has_exited() -> bool:
        ended, status = os.waitpid(pid, os.WNOHANG)
        found.extend([status] if ended else [])
        return bool(ended)

    wait_for(has_exited, "the process is still there")
    return os.waitstatus_to_exitcode(found[0])


def lines(recipe: Recipe) -> list[dict[str, object]]:
    path = recipe.run_dir / "record.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def trained(recipe: Recipe, kind: str) -> bool:
    """Whether there is a step after the last event of this kind."""
    events = [number for number, line in enumerate(lines(recipe)) if line.get("event") == kind]
    return bool(events) and any("loss" in line for line in lines(recipe)[events[-1] :])


@pytest.mark.slow
def test_a_run_whose_terminal_closes_saves_and_is_resumed(workspace: Path, tmp_path: Path) -> None:
    """Started by the launcher, and resumed without it."""
    recipe = tiny_recipe(workspace, f"out={tmp_path}", "train.steps=100000", "checkpoint.every=100000 steps",
                         "track.log_every=1")  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_yaml(recipe))
    saved: list[int] = []
    for kind, words in (("start", ["launch", "--nproc-per-node", "1", "--"]), ("resume", [])):
        with in_terminal([sys.executable, "-m", "zero2all.cli", *words, "train", str(path)]) as (pid, master):
            wait_for(lambda kind=kind: trained(recipe, kind), f"no step after {kind}")  # type: ignore[misc]
            os.close(master)
            assert exit_status(pid) not in (0, -signal.SIGHUP)
        steps = Run(recipe, recipe.run_dir).checkpoints.steps()
        assert steps, "nothing was saved"
        saved.append(steps[-1])
        assert [line["step"] for line in lines(recipe) if line.get("event") == "stopped"][-1] == saved[-1]
    resumed = [line["step"] for line in lines(recipe) if line.get("event") == "resume"]
    assert resumed == saved[:1]
    assert saved[1] > saved[0]


def test_nohup_stays_in_force() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop_on_signals()
        with hold_back_interrupts(), stop_requested() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.is_set()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_sighup_requests_a_stop() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with stop_requested() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.is_set()
    assert signal.getsignal(signal.SIGHUP) == before
    assert signal.SIGHUP in stop_signals()


def test_output_to_a_closed_terminal_is_dropped_and_a_log_file_is_kept(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\nfrom zero2all.base.processes import leave_terminal\n"
        "sys.stdin.readline()\nleave_terminal()\n"
        "print('to nobody', flush=True); print('to nobody', file=sys.stderr, flush=True)\n"
        f"open({str(tmp_path / 'done')!r}, 'w').close()"
    )
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    os.close(master)
    process.communicate(b"go\n", timeout=SECONDS)
    assert process.returncode == 0
    assert (tmp_path / "done").exists()
    log = tmp_path / "log"
    with open(log, "wb") as stream:
        subprocess.run(
            [sys.executable, "-c", program], input=b"go\n", stdout=stream, stderr=stream, timeout=SECONDS, check=True
        )
    assert log.read_text().count("to nobody") == 2
