"""Any script under ``z2a launch -- python script.py``: what torchrun runs, with hang detection and failure reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import run_preloaded
from zero2all.cluster.launch import hang_detection, heartbeat
from zero2all.cluster.launch.hang_detection import ActivityWatch
from zero2all.cluster.launch.heartbeat import Heartbeat, StartupPhase, beat, create_heartbeat
from zero2all.cluster.launch.restart_policy import MAX_FAILURES_PER_STEP, RestartPolicy
from zero2all.cluster.launch.worker import SCRIPT_MODULE, collectives_path, worker_command

DDP = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from zero2all.base.environment import collective_backend

dist.init_process_group(collective_backend("cpu"))
rank, first_try = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    if step == 2:
        # One write: with PYTHONUNBUFFERED print() writes the end of a line by itself, and lines of two ranks mix.
        weight = f"{model.module.weight.sum().item():.6f}"
        group = f"{weight}, {dist.get_backend()}, on GPUs {collective_backend('cuda')}"
        sys.stdout.write(f"{first_try}: rank {rank} of {dist.get_world_size()}: {group}\\n")
        sys.stdout.flush()
    if step == 2 and rank == 1:
        if first_try:
            raise ValueError("a batch with NaN")
        time.sleep(1000)  # here
    optimizer.zero_grad()
    model(torch.ones(2, 4) * (rank + 1)).pow(2).mean().backward()
    optimizer.step()
"""
LAUNCH = """
import os, sys
from zero2all.cli.main import main
os.chdir(sys.argv[1])
os.environ.pop("PYTORCH_ALLOC_CONF", None)  # of the process of the tests
sys.argv[1:2] = ["launch"]
main()
"""
SHOW_ENVIRONMENT = "import json, os, sys\nsys.stdout.write(json.dumps(dict(os.environ)) + '\\n')\n"
SHOW_MAIN = """
import sys
print(__name__, __file__, sys.argv, sys.path, sys.modules["__main__"].__dict__ is globals())
"""


def launch(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_preloaded(LAUNCH, str(directory), *words)


def run(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTORCH_ALLOC_CONF"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=200, cwd=directory, env=environment
    )


def the_reports(directory: Path) -> list[str]:
    return [path.read_text() for path in sorted((directory / "z2a-reports" / "failures").glob("*.txt"))]


@pytest.mark.parametrize(
    ("command", "args"),
    [
        (["train", "my.yaml"], ["-m", "zero2all.cli", "train", "my.yaml"]),
        (["python", "a.py", "-m", "x"], ["-m", SCRIPT_MODULE, "run", "a.py", "-m", "x"]),
        ([sys.executable, "-m", "a.b", "-u"], ["-m", SCRIPT_MODULE, "module", "a.b", "-u"]),
        (["python3", "-uB", "-X", "dev", "a.py"], ["-uB", "-X", "dev", "-m", SCRIPT_MODULE, "run", "a.py"]),
        (["python", "-c", "pass"], ["-m", SCRIPT_MODULE, "exec", "python", "-c", "pass"]),
        (["python", "-I", "a.py"], ["-m", SCRIPT_MODULE, "exec", "python", "-I", "a.py"]),
        (["/elsewhere/bin/python", "a.py"], ["-m", SCRIPT_MODULE, "exec", "/elsewhere/bin/python", "a.py"]),
        (["./run.sh", "x"], ["-m", SCRIPT_MODULE, "exec", "./run.sh", "x"]),
        (["python"], ["-m", SCRIPT_MODULE, "exec", "python"]),
    ],
)
def test_what_a_rank_runs(command: list[str], args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    worker = worker_command(command, "zero2all.cli")
    assert list(worker.args) == args
    assert worker.is_script == (command[0] != "train")


@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_sees_what_it_sees_under_python(tmp_path: Path, as_module: bool) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "show.py").write_text(SHOW_MAIN)
    plain = ["-m", "package.show"] if as_module else ["package/show.py"]
    ours = ["module", "package.show"] if as_module else ["run", "package/show.py"]
    expected = run(tmp_path, *plain, "--lr", "3")
    found = run(tmp_path, "-m", SCRIPT_MODULE, *ours, "--lr", "3")
    assert expected.stdout.startswith("__main__"), expected.stderr
    assert found.stdout == expected.stdout, found.stderr


def test_an_exception_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("def work():\n    raise ValueError('no')\n\nwork()\n")
    expected = run(tmp_path, str(tmp_path / "fails.py"))
    found = run(tmp_path, "-m", SCRIPT_MODULE, "run", str(tmp_path / "fails.py"))
    assert (found.returncode, found.stderr) == (expected.returncode, expected.stderr)


@pytest.mark.slow
def test_a_script_gets_the_environment_of_torchrun(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW_ENVIRONMENT)
    theirs = run(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "show.py")
    ours = launch(tmp_path, "--nproc-per-node", "2", "--", "python", "show.py")
    by_rank = [
        {(values := json.loads(line))["RANK"]: values for line in done.stdout.splitlines() if line.startswith("{")}
        for done in (theirs, ours)
    ]
    assert [sorted(ranks) for ranks in by_rank] == [["0", "1"]] * 2, (theirs.stderr, ours.stderr)
    assert ours.returncode == 0
    # Different by nature; whether rank 0 or the agent hosts the store; and threads: a share of the cores, not 1.
    own = {"MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "ROLE_NAME"}
    own |= {"TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    for rank in ("0", "1"):
        torchruns, found = by_rank[0][rank], by_rank[1][rank]
        added = {name for name in torchruns if os.environ.get(name) != torchruns[name]}
        assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"} <= added
        assert added - set(found) <= {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
        assert {name: found[name] for name in added - own} == {name: torchruns[name] for name in added - own}
        assert "Z2A_BACKEND" not in found, "NCCL on GPUs"
        assert found["TORCHELASTIC_USE_AGENT_STORE"] == "False", "rank 0 hosts the store, at an address of this node"
        assert "PYTORCH_ALLOC_CONF" not in found, "the allocator of a script is its own affair"


@pytest.mark.slow
def test_a_script_that_crashes_is_restarted_and_one_that_hangs_without_heartbeats_is_found(tmp_path: Path) -> None:
    (tmp_path / "ddp.py").write_text(DDP)
    options = ["--procs", "2", "--backend", "gloo", "--max-restarts", "1", "--hang-after", "6"]
    done = launch(tmp_path, *options, "--", "python", "ddp.py")
    assert done.returncode == 1, done.stderr
    lines = sorted(line.split(": ") for line in done.stdout.splitlines() if ": rank " in line)
    assert [line[:2] for line in lines] == [
        [first, f"rank {rank} of 2"] for first in ("False", "True") for rank in "01"
    ]
    assert len({line[2] for line in lines}) == 1, "the ranks have the same weights"
    assert lines[0][2].endswith(", gloo, on GPUs cpu:gloo,cuda:gloo")
    crash, hang = the_reports(tmp_path)
    assert crash.startswith("crash, "), "nothing is known of its steps"
    assert "first to fail: rank 1" in crash
    assert 'raise ValueError("a batch with NaN")' in crash
    assert "script.py" not in crash.replace(str(tmp_path), "")
    assert hang.startswith("hang, ")
    assert "rank 1 is not in the collective that the others wait in" in hang
    sleeping = DDP.splitlines().index("        time.sleep(1000)  # here") + 1
    assert f"> rank 1: {tmp_path}/ddp.py:{sleeping} in <module>" in hang
    assert "given up: no restarts are left (--max-restarts)" in hang
    assert "last collective gloo:" in hang, "the flight recorder was dumped"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["python", "usage.py", "--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["recipe", "show", "no-such-file.yaml"], "no recipe at no-such-file.yaml"),
    ],
    ids=["script", "z2a"],
)
def test_wrong_usage_is_not_retried(command: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "usage.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    done = launch(tmp_path, "--max-restarts", "5", "--procs", "1", "--", *command)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(said) == 1
    assert "not tried again" in done.stderr


def test_a_program_that_cannot_be_executed(tmp_path: Path) -> None:
    assert run(tmp_path, "-m", SCRIPT_MODULE, "run", "missing.py").returncode == 2
    assert run(tmp_path, "-m", SCRIPT_MODULE, "exec", "./missing").returncode == 127
    (tmp_path / "text").write_text("no program")
    assert run(tmp_path, "-m", SCRIPT_MODULE, "exec", "./text").returncode == 126


class Clock:
    """A time that the test sets."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(hang_detection, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("code", "is_active"),
    [
        ("import time; time.sleep(60)", False),
        ("while True: pass", True),
        ("import time\nwhile True: open('/dev/null', 'wb', 0).write(b'x'); time.sleep(0.01)", True),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])", True),
    ],
    ids=["sleeps", "computes", "writes", "its child computes"],
)
def test_activity_of_a_process_is_seen_from_outside(code: str, is_active: bool, tmp_path: Path, clock: Clock) -> None:
    watch = ActivityWatch(tmp_path, hang_after=10)
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        deadline, history = time.monotonic() + 30, [0.0]
        # As long as Python starts, all are active; three checks in a row decide.
        while time.monotonic() < deadline and (len(history) < 10 or len(set(history[-3:])) != (3 if is_active else 1)):
            clock.now += watch.interval
            history.append(watch.idle_since({0: process.pid})[0])
            time.sleep(0.1)
        assert len(set(history[-3:])) == (3 if is_active else 1), history
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def test_a_collective_that_stays_pending_is_a_hang_though_the_host_spins(tmp_path: Path, clock: Clock) -> None:
    def dump(number: int, state: str) -> None:
        entry = {
            "profiling_name": "nccl:all_reduce", "collective_seq_id": number, "process_group": ["0", "default_pg"],
            "time_created_ns": number, "state": state,
        }  # fmt: skip
        collectives_path(tmp_path, 0).write_text(json.dumps({"entries": [entry]}))

    watch = ActivityWatch(tmp_path, hang_after=10)
    usage = iter(hang_detection._Usage(float(number), 0) for number in range(100))  # it spins
    checks: list[float] = []
    for number, state in [(1, "completed"), (2, "started"), (3, "started"), (3, "started"), (3, "started")]:
        clock.now += 1
        dump(number, state)
        watch._check(0, next(usage), clock.now)
        checks.append(clock.now - watch._ranks[0].idle_since())
    assert checks == [0, 0, 0, 1, 2]


def test_beats_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("Z2A_AGENT_DIR", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    heartbeat._own_heartbeat.cache_clear()
    agents: Heartbeat = create_heartbeat(tmp_path, 0)
    try:
        beat()
        assert not agents.read().has_stepped, "progress, but no step: its time is not limited yet"
        beat(7)
        status = agents.read()
        assert (status.step, status.is_stepping) == (7, True)
        assert all(status.phase_times[phase] > 0 for phase in (StartupPhase.JOINED, StartupPhase.LOADED))
    finally:
        heartbeat._own_heartbeat.cache_clear()


def test_without_a_launcher_a_beat_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("Z2A_AGENT_DIR", raising=False)
    heartbeat._own_heartbeat.cache_clear()
    beat(1)
    heartbeat._own_heartbeat.cache_clear()


def test_restarts_of_a_script_are_limited_by_number_until_it_tells_its_steps() -> None:
    policy = RestartPolicy(sees_progress=False)
    assert all(policy.reason_to_give_up("crash", -1, 1, restarts_left=1) is None for _ in range(20))
    assert policy.reason_to_give_up("crash", -1, 1, restarts_left=0) is not None
    policy.record_progress(5)
    reasons = [policy.reason_to_give_up("crash", 5, 1, restarts_left=99) for _ in range(MAX_FAILURES_PER_STEP)]
    assert reasons[-1] is not None
