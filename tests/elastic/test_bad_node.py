"""One node that fails repeatedly, and nodes that the parallel layout cannot use."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import tiny_recipe
from zero2all.elastic.job_secret import new_secret
from zero2all.elastic.launcher import node_counts
from zero2all.elastic.restart_policy import RestartPolicy, should_exclude_node
from zero2all.environment import JOB_SECRET_VARIABLE
from zero2all.recipe import recipe_yaml

LAUNCH = """
import sys
from zero2all.elastic.launcher import LaunchConfig
module = "tests.elastic.lone_rank"
config = LaunchConfig([sys.argv[1]], procs=1, nodes=(1, 2), rdzv_endpoint=sys.argv[2], module=module, grace=60)
sys.exit(config.run())
"""


class OtherNodes:
    """A rendezvous that reports failures of other nodes."""

    def __init__(self, left: int, elsewhere: bool = False) -> None:
        self.answer = left, elsewhere

    def report_node_failure(self, step: int) -> tuple[int, bool]:
        return self.answer


def test_a_node_that_fails_alone_leaves_and_a_step_that_fails_everywhere_ends_the_job() -> None:
    assert should_exclude_node(OtherNodes(2), "crash", 7, nodes=3)
    assert should_exclude_node(OtherNodes(2), "wrong usage", -1, nodes=3), (
        "such as a disk that is mounted on the others only"
    )
    assert not should_exclude_node(OtherNodes(0), "crash", 7, nodes=3), "too few would be left"
    assert not should_exclude_node(OtherNodes(2, elsewhere=True), "crash", 7, nodes=3)
    assert not should_exclude_node(OtherNodes(2), "cut off", 7, nodes=3), "the cause is elsewhere"
    assert not should_exclude_node(OtherNodes(2), "crash", 7, nodes=1)


def test_failures_caused_by_another_node_do_not_count_as_this_one_s() -> None:
    policy = RestartPolicy()
    assert [policy.reason_to_give_up("cut off", 7, 2, 99) for _ in range(5)] == [None] * 5
    one_node = RestartPolicy()
    assert [one_node.reason_to_give_up("cut off", 7, 1, 99) is None for _ in range(3)] == [True, True, False]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_others_continue_without_a_bad_node(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {**os.environ, JOB_SECRET_VARIABLE: new_secret(), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", LAUNCH, str(tmp_path), f"127.0.0.1:{port}"]
    with open(tmp_path / "good.txt", "wb") as log:
        good = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
    wait_for(tmp_path / "ranks-1", good, tmp_path / "good.txt")
    bad = subprocess.run(words, env={**environment, "BAD": "1"}, capture_output=True, text=True, timeout=400)
    try:
        assert bad.returncode == 1, bad.stderr
        assert "this node leaves the job" in bad.stderr
        (tmp_path / "ranks-1").unlink()  # only now: the rank of the first round touched it until the second began
        wait_for(tmp_path / "ranks-1", good, tmp_path / "good.txt")  # one node again
        (tmp_path / "end").touch()
        assert good.wait(200) == 0, (tmp_path / "good.txt").read_text()
    finally:
        good.kill()
        good.wait()


def wait_for(path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 200
    while not path.exists():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def test_a_parallel_layout_over_several_nodes_uses_them_in_multiples(workspace: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_yaml(tiny_recipe(workspace)), encoding="utf-8")

    def counts(*overrides: str, nodes: tuple[int, int] = (1, 6)) -> tuple[int, ...]:
        return node_counts(["train", str(recipe), *overrides], 1, nodes)

    assert counts() == (1, 2, 3, 4, 5, 6)
    assert counts("parallel={tp: 2}") == (2, 4, 6)
    assert counts("parallel={tp: 2}", nodes=(3, 5)) == (4,)
    assert counts("parallel={tp: 2}", "--extend", "rewarm", "--json") == (2, 4, 6)
    assert counts("parallel={dp_shard: 2, dp_replicate: 2}") == (4,)
    assert counts("parallel={tp: 2}", nodes=(3, 3)) == (3,), "the ranks will report the error"
    assert node_counts(["train", "no-such-file.yaml"], 8, (1, 2)) == (1, 2)
    assert node_counts(["doctor"], 8, (2, 2)) == (2,)
