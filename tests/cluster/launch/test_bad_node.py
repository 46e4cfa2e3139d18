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
from zero2all.base.environment import JOB_SECRET_VARIABLE
from zero2all.cluster.launch.job_secret import new_secret
from zero2all.cluster.launch.launcher import node_counts
from zero2all.cluster.launch.restart_policy import RestartPolicy
from zero2all.recipe import recipe_yaml

LAUNCH = """
import sys
from zero2all.cluster.launch.launcher import LaunchConfig
module = "tests.cluster.launch.lone_rank"
options = {"advertise": sys.argv[3], "module": module, "grace": 60}
config = LaunchConfig([sys.argv[1]], procs=1, nodes=(1, 2), rdzv_endpoint=sys.argv[2], **options)
sys.exit(config.run())
"""


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
        good = subprocess.Popen([*words, "127.0.0.2"], env=environment, stdout=log, stderr=log)
    wait_for(tmp_path / "ranks-1", good, tmp_path / "good.txt")
    words += ["127.0.0.3"]
    bad = subprocess.run(words, env={**environment, "BAD": "1"}, capture_output=True, text=True, timeout=400)
    try:
        assert bad.returncode == 1, bad.stderr
        assert "this node is excluded: only its ranks fail after step 0 (crash)" in bad.stderr
        again = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100)
        assert again.returncode == 1, "it does not come back by itself"
        assert "is excluded from the job: only its ranks fail after step 0 (crash)" in again.stderr
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
