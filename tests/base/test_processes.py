"""No command leaves a process behind, however it ends."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import ENGLISH, tiny_recipe
from tests.processes import MARK, gone, marked
from zero2all.recipe import recipe_yaml

SIGNALS = [signal.SIGTERM, signal.SIGKILL]
START = 120.0  # seconds until a command has started what it starts, on a busy machine

ENGINE = """
import sys, time
from pathlib import Path
from tests.process_work import work
from zero2all.base.tasks import TaskEngine
if __name__ == "__main__":
    TaskEngine(workers=2).run(work, [(sys.argv[1], number, sys.argv[2] == "busy") for number in range(2)])
    Path(sys.argv[1], "idle").touch()
    time.sleep(1000)
"""
RANKS = """
import sys
from tests.process_work import spin
from zero2all.bench import rank_harness
rank_harness.PRELOADED[:] = [rank_harness.__name__]  # of what it imports, the ranks use no more
if __name__ == "__main__":
    rank_harness.run_ranks(2, spin, sys.argv[1], seconds=1000)
"""

AGENT = """
import os, subprocess, sys
own = {"Z2A_AGENT_DIR": sys.argv[1], "Z2A_AGENT_PID": str(os.getpid()), "LOCAL_RANK": "0"}
path = os.pathsep.join([sys.argv[1], os.environ["PYTHONPATH"]])
rank = [sys.executable, "-m", "zero2all.cli", "--version"]
subprocess.run(rank, env={**os.environ, **own, "PYTHONPATH": path})
"""


class Started:
    """A process with a mark that all of its descendants carry."""

    def __init__(self, *words: str) -> None:
        self.mark = uuid.uuid4().hex
        here = {MARK: self.mark, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])}
        self.process = subprocess.Popen(
            [sys.executable, *words], env={**os.environ, **here}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def until(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START
        while not ready():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, marked(self.mark)
            time.sleep(0.02)

    def children(self) -> int:
        return len(marked(self.mark)) - 1

    def output(self) -> str:
        return self.process.stdout.read().decode(errors="replace")

    def ends(self, number: signal.Signals, status: int | None = None) -> None:
        """Send the signal; then no process with the mark is left, and a command has exited as after Ctrl-C."""
        try:
            self.process.send_signal(number)
            self.process.wait(60)
            gone(self.mark)
            if status is not None and number == signal.SIGTERM:
                assert self.process.returncode == status, self.output()
        finally:
            for pid in marked(self.mark):
                os.kill(pid, signal.SIGKILL)
            self.process.stdout.close()


def z2a(*words: str) -> Started:
    return Started("-m", "zero2all.cli", *words)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("state", ["busy", "idle"])
def test_pool_workers_end_with_their_parent(tmp_path: Path, state: str, number: signal.Signals) -> None:
    script = Started("-c", ENGINE, str(tmp_path), state)
    script.until(
        lambda: len(list(tmp_path.glob("worker-*"))) == 2 and (state == "busy" or (tmp_path / "idle").exists())
    )
    assert script.children() >= 2
    script.ends(number)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
def test_ranks_end_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    script = Started("-c", RANKS, str(tmp_path))
    script.until(lambda: len(list(tmp_path.glob("rank-*"))) == 2)
    script.ends(number)


def fake_torch(directory: Path, then: str) -> Path:
    """A fake torch; returns the file that it creates when it is imported."""
    (directory / "torch").mkdir()
    imported = directory / "imported"
    (directory / "torch" / "__init__.py").write_text(f"open({str(imported)!r}, 'w').close()\n{then}\n")
    return imported


def test_a_rank_ends_with_an_agent_that_is_killed_while_it_imports_torch(tmp_path: Path) -> None:
    imported = fake_torch(tmp_path, "import time; time.sleep(1000)")
    agent = Started("-c", AGENT, str(tmp_path))
    agent.until(imported.exists)
    agent.ends(signal.SIGKILL)


def test_a_rank_whose_agent_was_killed_earlier_ends_at_once(tmp_path: Path) -> None:
    imported = fake_torch(tmp_path, "raise SystemExit(3)")
    agent = subprocess.Popen([sys.executable, "-c", ""])
    agent.wait()
    own = {"Z2A_AGENT_DIR": str(tmp_path), "Z2A_AGENT_PID": str(agent.pid), "LOCAL_RANK": "0"}
    path = os.pathsep.join([str(tmp_path), *sys.path])
    rank = [sys.executable, "-m", "zero2all.cli", "--version"]
    done = subprocess.run(rank, env={**os.environ, **own, "PYTHONPATH": path}, timeout=START)
    assert done.returncode == -signal.SIGKILL
    assert not imported.exists()


@pytest.mark.parametrize("wrapper", [[], ["sh", "-c", '"$@"; exit $?', "sh"]])
def test_a_rank_lives_with_its_agent_and_its_children_are_no_ranks(wrapper: list[str]) -> None:
    """Also with a wrapper between the two, such as numactl."""
    script = (
        "import os, subprocess, sys; from zero2all.base.processes import AGENT_PID, end_with_agent; end_with_agent();"
        "sys.exit(subprocess.call([sys.executable, '-c', f'import os; assert {AGENT_PID!r} not in os.environ']))"
    )
    environment = {**os.environ, "Z2A_AGENT_PID": str(os.getpid()), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*wrapper, sys.executable, "-c", script], env=environment, timeout=START)
    assert done.returncode == 0


def test_a_pool_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    """Workers watch the process, not the thread: the kernel's signal on a parent's death is sent at a thread's end."""
    from zero2all.base.tasks import TaskEngine, shutdown_workers

    shutdown_workers()
    engine, results = TaskEngine(workers=2), []
    thread = threading.Thread(target=lambda: results.extend(engine.run(abs, [(-1,), (-2,)])))
    thread.start()
    thread.join()
    assert results == [1, 2]
    assert engine.run(abs, [(-3,), (-4,)]) == [3, 4]
    shutdown_workers()


def write_sources(directory: Path) -> Path:
    directory.mkdir()
    for file in range(24):
        lines = [json.dumps({"text": f"{file} {number} {ENGLISH * 20}"}) + "\n" for number in range(200)]
        (directory / f"{file}.jsonl").write_text("".join(lines), encoding="utf-8")
    recipe = directory.parent / "recipe.yaml"
    out = directory.parent
    recipe.write_text(
        f"corpus: {{sources: [{{name: en, paths: ['{directory}']}}], dir: '{out}/documents'}}\n"
        f"tokenizer: {{vocab_size: 512, dir: '{out}/tokenizer'}}\n",
        encoding="utf-8",
    )
    return recipe


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_a_corpus_build(tmp_path: Path, number: signal.Signals) -> None:
    command = z2a("corpus", "build", str(write_sources(tmp_path / "raw")), "--workers", "2")
    command.until(lambda: any(tmp_path.glob("documents.work/parts/*.json")))
    assert command.children() >= 2
    command.ends(number, 1)


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS)
def test_a_corpus_build_on_ray(tmp_path: Path, number: signal.Signals) -> None:
    pytest.importorskip("ray")
    command = z2a("corpus", "build", str(write_sources(tmp_path / "raw")), "--ray", "auto")
    command.until(lambda: any(tmp_path.glob("documents.work/parts/*.json")))
    command.ends(number, 1)


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS)
def test_the_parity_table(number: signal.Signals) -> None:
    command = z2a("bench", "parity", "--only", "FSDP 2, accumulated")
    command.until(lambda: command.children() >= 2)
    command.ends(number, 1)


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS)
def test_a_benchmark_in_a_process_of_its_own(number: signal.Signals) -> None:
    command = z2a("bench", "ops", "z2all-10m", "--no-compile", "train.batch_tokens=4096")
    command.until(lambda: command.children() >= 1)
    command.ends(number, 1)


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS)
def test_a_launched_run(workspace: Path, tmp_path: Path, number: signal.Signals) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_yaml(tiny_recipe(workspace, f"out={tmp_path}", "train.steps=100000")), encoding="utf-8")
    command = z2a("launch", "--procs", "2", "--", "train", str(recipe))
    command.until(lambda: any(tmp_path.glob("**/record.jsonl")) and command.children() >= 2)
    command.ends(number, 1)


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS)
def test_watching_through_ssh(tmp_path: Path, number: signal.Signals) -> None:
    pytest.importorskip("uvicorn")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.jsonl").write_text('{"time": 1.0, "step": 0, "loss": 2.0}\n')
    (tmp_path / "run" / "recipe.yaml").write_text("name: run\n")
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nsh\nexit $?\n")  # a shell at the other end of a pipe, as ssh gives
    ssh.chmod(0o755)
    command = z2a("watch", f"ssh://host{tmp_path}/run", "--ssh", str(ssh))
    command.until(lambda: command.children() >= 2)
    command.ends(number)


BUSY = """
import re

def main(connection):
    connection.send_bytes(b"started")
    re.match(r"(a+)+$", "a" * 60 + "b")  # for years, without a moment for another thread
"""
LIMITED = """
import sys, time
from pathlib import Path
from zero2all.base.limited_process import LimitedProcess

child = LimitedProcess(Path(sys.argv[1]), (), 60, 1 << 30)
child.connection.recv_bytes()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel signals a closed pipe")
@pytest.mark.timeout(120)
def test_a_busy_child_for_untrusted_input_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "busy.py"
    program.write_text(BUSY)
    parent = subprocess.Popen([sys.executable, "-c", LIMITED, str(program)], stdout=subprocess.PIPE, text=True)
    child = os.pidfd_open(int(parent.stdout.readline()))  # readable once it has ended
    try:
        assert select.select([child], [], [], 0)[0] == []
        parent.kill()
        parent.communicate()
        assert select.select([child], [], [], 20)[0] == [child]
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)
