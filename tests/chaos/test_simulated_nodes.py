"""Simulated nodes share files and nothing else, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.simulated_nodes import (
    NODE_TMPDIR,
    simulated_network,
    simulated_nodes,
    simulation_unavailable_reason,
)
from tests.processes import gone, marked

pytestmark = pytest.mark.skipif(
    simulation_unavailable_reason() is not None,
    reason=f"nodes cannot be simulated here: {simulation_unavailable_reason()}",
)
SHM = Path("/dev/shm")


def test_memory_and_temporary_files_are_private_to_a_node_and_other_files_are_shared(tmp_path: Path) -> None:
    with simulated_nodes(2) as (one, other):
        one.run("sh", "-c", f"echo one >/dev/shm/z2a-note; mktemp; echo shared >{tmp_path}/file")
        assert one.path(SHM / "z2a-note").read_text() == "one\n"
        assert not other.path(SHM / "z2a-note").exists()
        assert not (SHM / "z2a-note").exists()
        assert {path.name[:4] for path in one.path(NODE_TMPDIR).iterdir()} == {"host", "tmp."}
        assert [path.name for path in other.path(NODE_TMPDIR).iterdir()] == ["hosts"]
        assert other.run("cat", f"{tmp_path}/file") == "shared\n"
        assert one.run("uname", "-n") != other.run("uname", "-n")


def test_a_power_cycle_kills_processes_and_clears_memory() -> None:
    with simulated_network(2) as network:
        one, other = network.nodes
        sleeping = subprocess.Popen(one.command("sleep", "1000"))
        for node in (one, other):
            node.run("touch", "/dev/shm/z2a-note")
        mounted = one.mount_small_disk(NODE_TMPDIR / "disk", "64k")
        (mounted / "file").touch()
        network.power_cycle(one)
        assert sleeping.wait(30) == -signal.SIGKILL
        assert not one.path(SHM / "z2a-note").exists()
        assert not one.path(NODE_TMPDIR / "disk").exists()
        assert other.path(SHM / "z2a-note").exists()
        assert "cable" in one.run("ip", "link"), "and its cable is connected again"


SUITE = """
import subprocess, sys
from collections.abc import Callable
from pathlib import Path
from tests.chaos.simulated_nodes import NODE_TMPDIR, simulated_nodes
with simulated_nodes(2) as (one, other):
    one.mount_small_disk(NODE_TMPDIR / "disk", "64k")
    subprocess.Popen(one.command("sleep", "1000"))
    subprocess.run(other.command("setsid", "-f", "sleep", "1000"))  # a daemon, whose parent is gone
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_nodes_whose_creator_was_killed(number: signal.Signals) -> None:
    mark, before = f"z2a-{os.getpid()}-{number}", Path("/proc/mounts").read_text()
    suite = subprocess.Popen(
        [sys.executable, "-c", SUITE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "Z2A_TEST_MARK": mark},
        cwd=Path(__file__).parents[2],
    )
    assert suite.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + 30
    while len(marked(mark)) < 6:  # three nodes, two sleepers, which are still being started, and the suite
        assert time.monotonic() < deadline, marked(mark)
        time.sleep(0.05)
    suite.send_signal(number)
    assert suite.wait(30) == -number
    gone(mark)
    assert Path("/proc/mounts").read_text() == before


def test_a_suspended_node_stands_still_until_it_is_resumed(tmp_path: Path) -> None:
    ticks = tmp_path / "ticks"
    with simulated_nodes(1) as [node]:
        ticking = subprocess.Popen(node.command("sh", "-c", f"while true; do echo tick >>{ticks}; sleep 0.01; done"))
        try:
            wait_for(lambda: ticks.exists() and ticks.stat().st_size > 20)
            node.suspend()
            size = ticks.stat().st_size
            states = [Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in node.processes()]
            assert set(states) == {"T"}
            assert ticks.stat().st_size == size
            node.resume()
            wait_for(lambda: ticks.stat().st_size > size)
        finally:
            ticking.kill()
            ticking.wait()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
