"""Ranks are bound to the CPUs of a NUMA node, and see for themselves whether they are; others use the CPU too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_preloaded
from tests.sysfs import FakeSysfs
from zero2all.base.machine import cpus
from zero2all.base.machine.cpus import (
    CpuBinding,
    OtherCpuUse,
    binding_state,
    busy_note,
    encode_bindings,
    parse_cpu_list,
    plan_bindings,
    read_numa_nodes,
    show_cpu_list,
    threads_per_rank,
    wanted_binding,
)
from zero2all.cluster.job_files import JobResources, slurm_script
from zero2all.cluster.launch.launcher import LaunchConfig

linux = pytest.mark.skipif(sys.platform != "linux", reason="CPU affinity is Linux's")


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    fake = FakeSysfs(tmp_path, {0: "0-7,16-23", 1: "8-15,24-31"})
    fake.share_cache("0-3,16-19", [*range(4), *range(16, 20)])
    fake.share_cache("4-7,20-23", [*range(4, 8), *range(20, 24)])
    return tmp_path


def test_nodes_are_read_from_sysfs(two_sockets: Path) -> None:
    first, second = read_numa_nodes(two_sockets)
    assert (first.number, first.cpus[:3], first.memory, first.distances) == (0, (0, 1, 2), 2**30, (10, 21))
    assert second.distances == (21, 10)
    assert read_numa_nodes(two_sockets / "nothing") == []


@pytest.mark.parametrize("text", ["", "0", "0-3", "0-3,8,10-11"])
def test_lists_of_cpus_are_written_as_they_are_read(text: str) -> None:
    assert show_cpu_list(parse_cpu_list(text)) == text


FIRST, SECOND = "0-7,16-23", "8-15,24-31"


@pytest.mark.parametrize(
    ("policy", "gpus", "ranks", "allowed", "expected"),
    [
        ("auto", [0, 0, 1, None], 4, range(32), [FIRST, FIRST, SECOND, None]),
        # The ranks of a node take its core complexes in turn.
        ("core-complex", [0, 0, 0, 1], 4, range(32), ["0-3,16-19", "4-7,20-23", "0-3,16-19", SECOND]),
        # Ranks without GPUs are spread if they leave no CPU idle.
        ("auto", [], 4, range(32), [FIRST, FIRST, SECOND, SECOND]),
        ("auto", [], 1, range(32), [None]),
        ("auto", [], 3, range(32), [None] * 3),
        ("node", [], 1, range(32), [FIRST]),
        ("off", [0, 1], 2, range(32), [None, None]),
        ("node", [0, 1], 2, range(2, 6), ["2-5", None]),
    ],
)
def test_ranks_are_bound_to_the_node_of_their_gpu(
    policy: Any, gpus: list[int | None], ranks: int, allowed: range, expected: list[str | None], two_sockets: Path
) -> None:
    plan = plan_bindings(policy, ranks, gpus, allowed, two_sockets)
    assert [binding and binding.cpus for binding in plan] == expected


def test_ranks_of_a_node_share_its_threads(two_sockets: Path) -> None:
    for nodes, threads in (([0, 0, 1, None], 8), ([0] * 4, 4)):
        assert threads_per_rank(plan_bindings("auto", 4, nodes, range(32), two_sockets), 32) == threads


def test_one_node_needs_no_binding(tmp_path: Path) -> None:
    FakeSysfs(tmp_path, {0: "0-7"})
    assert plan_bindings("auto", 2, [0, 0], range(8), tmp_path) == [None, None]
    assert encode_bindings([None, None]) == {}


def test_a_rank_finds_its_own_binding() -> None:
    environment = encode_bindings([None, CpuBinding(1, "4-7")])
    assert wanted_binding({}) is None
    assert wanted_binding({**environment, "LOCAL_RANK": "0"}) is None
    assert wanted_binding({**environment, "LOCAL_RANK": "1"}) == CpuBinding(1, "4-7")


@pytest.mark.parametrize(
    ("cpus", "memory", "problem"),
    [
        ("0-3", "0-1", ""),
        ("0-1", "0-1", "runs on CPUs 0-1, not on 0-3 of NUMA node 0"),
        ("0-3", "1", "may use memory of NUMA nodes 1 only, and runs on CPUs of node 0"),
    ],
)
def test_what_the_kernel_allows_is_compared_with_what_was_planned(
    tmp_path: Path, cpus: str, memory: str, problem: str
) -> None:
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{memory}\n")
    assert binding_state(CpuBinding(0, "0-3"), status=status).problem == problem


BIND_AND_WAIT = """
import sys
from zero2all.base.machine.cpus import bind_rank
print(bind_rank().problem, flush=True)
sys.stdin.read()
"""


@linux
@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: [])(0)) < 2, reason="needs two CPUs")
def test_processes_are_bound_where_the_kernel_says() -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    bindings = encode_bindings([CpuBinding(0, str(cpu)) for cpu in cpus])
    for rank, cpu in enumerate(cpus):
        environment = {**os.environ, **bindings, "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-c", BIND_AND_WAIT]
        with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True) as process:
            assert process.stdout.readline() == "\n"
            assert f"Cpus_allowed_list:\t{cpu}\n" in Path(f"/proc/{process.pid}/status").read_text()
            process.stdin.close()


@linux
def test_a_binding_to_cpus_that_are_not_there_is_reported() -> None:
    environment = {**os.environ, **encode_bindings([CpuBinding(3, "4000-4003")]), "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", BIND_AND_WAIT], env=environment, input="", capture_output=True, text=True, timeout=60
    )
    assert "binding to CPUs 4000-4003 failed" in done.stdout


LAUNCH = """
import sys
from pathlib import Path
from zero2all.cluster.launch.launcher import LaunchConfig
options = dict(procs=2, max_restarts=0, sysfs=Path(sys.argv[1]))
sys.exit(LaunchConfig(["doctor", "--json", "--dir", sys.argv[2]], **options).run())
"""


@linux
@pytest.mark.slow
@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: [])(0)) < 2, reason="needs two CPUs")
def test_launched_ranks_verify_their_binding(tmp_path: Path) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    FakeSysfs(tmp_path / "sys", {0: str(first), 1: str(second)})
    done = run_preloaded(LAUNCH, str(tmp_path / "sys"), str(tmp_path / "runs"))
    findings = {one["what"]: one for one in json.loads(done.stdout.splitlines()[0])["findings"]}
    # The second node of the made-up /sys has no memory here: its rank says so.
    nodes = parse_cpu_list(binding_state(None).memory_nodes)
    assert findings["rank 0, CPU binding"]["why"].startswith(f"CPUs {first} of NUMA node 0")
    expected = f"CPUs {second} of NUMA node 1" if 1 in nodes else "may use memory of NUMA nodes 0 only"
    assert findings["rank 1, CPU binding"]["why"].startswith(expected)


def test_a_job_file_carries_the_binding() -> None:
    config = LaunchConfig(["train", "a.yaml"], 2)
    assert "--numa-binding off" in slurm_script(replace(config, numa_binding="off"), JobResources())
    assert "--numa-binding" not in slurm_script(config, JobResources())


def stat(path: Path, *cores: tuple[int, int]) -> None:
    """/proc/stat of cores, each with seconds of user and idle time; other counters are zero."""
    ticks = os.sysconf("SC_CLK_TCK")
    rows = [f"cpu{number} {user * ticks} 0 0 {idle * ticks} 0 0 0 0 0 0" for number, (user, idle) in enumerate(cores)]
    path.write_text("\n".join(["cpu 9 9 9 9 9 9 9 9 9 9", *rows, "intr 5 6"]))


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "stat"
    read = cpus._read_cpu_times
    monkeypatch.setattr(cpus, "_read_cpu_times", lambda: read(path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return path


@pytest.mark.parametrize(
    ("own", "ranks", "share"),
    [(0, "1", 0.75), (10, "1", 0.25), (5, "2", 0.25), (15, "1", 0.0), (99, "1", 0.0)],
)
def test_the_share_of_others_is_what_is_busy_without_this_program(
    counters: Path, monkeypatch: pytest.MonkeyPatch, own: int, ranks: str, share: float
) -> None:
    """15 of 20 seconds are busy on the two cores that this process may use; the third core does not count."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(time, "process_time", lambda: 100.0)
    stat(counters, (100, 50), (200, 50), (7, 7))
    others = OtherCpuUse()
    monkeypatch.setattr(time, "process_time", lambda: 100.0 + own)
    stat(counters, (110, 50), (205, 55), (507, 7))
    assert others.share() == pytest.approx(share)
    assert others.share() is None, "no time has passed since"


def test_a_system_without_counters_reports_nothing(counters: Path) -> None:
    others = OtherCpuUse()
    assert others.share() is None
    counters.write_text("nonsense")
    assert others.share() is None
    assert busy_note(None) == ""


def test_a_note_is_made_of_a_noticeable_share_only() -> None:
    assert busy_note(0.19) == ""
    assert busy_note(0.456) == "other programs used 46% of the CPU"
