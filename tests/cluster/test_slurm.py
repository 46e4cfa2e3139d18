"""The Slurm script on a real Slurm of three nodes, through everything that a long job meets."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.cluster.launch.slurm_cluster import SlurmCluster, slurm_cluster, slurm_unavailable_reason
from tests.conftest import tiny_recipe
from zero2all.cluster.job_files import JobResources, slurm_script
from zero2all.cluster.launch.launcher import LaunchConfig
from zero2all.recipe import recipe_yaml
from zero2all.train import Run

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(slurm_unavailable_reason() is not None, reason=f"no Slurm: {slurm_unavailable_reason()}"),
]
GRACE = 20.0
STEPS = 1_000_000  # more than the job does before it is cancelled


def submit(cluster: SlurmCluster, recipe: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> str:
    tools = cluster.directory / "bin"  # a z2a that is this checkout
    tools.mkdir(exist_ok=True)
    (tools / "z2a").write_text(f'#!/bin/sh\nexec {sys.executable} -m zero2all.cli "$@"\n', encoding="utf-8")
    (tools / "z2a").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    config = LaunchConfig(["train", str(recipe), *overrides], procs=1, nodes=(2, 2), grace=GRACE)
    script = cluster.directory / "job.sh"
    script.write_text(slurm_script(config, JobResources()), encoding="utf-8")
    return cluster.run("sbatch", "--parsable", str(script))


def steps(log: str) -> list[int]:
    return [int(step) for step in re.findall(r"\bstep (\d+)/", log)]


def processes(cluster: SlurmCluster, node: int, pattern: str) -> list[int]:
    found = cluster.nodes[node].processes()
    return sorted(pid for pid, line in found.items() if re.search(pattern, line))  # children come after parents


class Progress:
    """The job's steps since the last time that one asked."""

    def __init__(self, cluster: SlurmCluster, job: str) -> None:
        self.cluster, self.job = cluster, job
        self.seen = 0

    def wait_for_steps(self, what: str, seconds: float = 120.0) -> int:
        """Until it makes steps after what it has logged so far; returns the first of them."""
        self.seen = len(self.cluster.log(self.job))
        self.cluster.wait_until(lambda: len(steps(self.cluster.log(self.job)[self.seen :])) >= 2, what, seconds)
        return steps(self.cluster.log(self.job)[self.seen :])[0]


@pytest.mark.timeout(600)
def test_a_job_on_slurm_outlives_kills_a_drained_node_and_its_time_limit(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.yaml"
    overrides = (f"out={tmp_path}", f"train.steps={STEPS}", "checkpoint.every=50 steps", "track.log_every=5")
    recipe.write_text(recipe_yaml(tiny_recipe(workspace, *overrides)), encoding="utf-8")
    with slurm_cluster(tmp_path, 3) as cluster:
        job = submit(cluster, recipe, monkeypatch)
        progress = Progress(cluster, job)
        first = progress.wait_for_steps("the job trains on two nodes")
        assert first < 50

        # The secret is in the environment of the agents, and nowhere where other users look.
        agent, *_ = processes(cluster, 1, r"cli launch .*--rdzv-endpoint")
        secret = re.search(rb"Z2A_JOB_SECRET=([0-9a-f]{64})", Path(f"/proc/{agent}/environ").read_bytes())
        shown = cluster.run("scontrol", "-dd", "show", "job", job) + cluster.run("scontrol", "show", "step")
        shown += cluster.run("scontrol", "write", "batch_script", job, "-") + cluster.log(job)
        assert secret[1].decode() not in shown + " ".join(
            line for n in cluster.nodes for line in n.processes().values()
        )

        checkpoints = Run.open(tmp_path).checkpoints  # written while training continues
        cluster.wait_until(lambda: checkpoints.newest() is not None, "there is a checkpoint")
        rank, *_ = processes(cluster, 1, r"zero2all\.cli train")
        os.kill(rank, signal.SIGKILL)
        cluster.wait_until(lambda: "training again after" in cluster.log(job), "a killed rank is restarted")
        assert progress.wait_for_steps("it goes on") > 50

        before = len(cluster.log(job))
        agent, *_ = processes(cluster, 1, r"cli launch .*--rdzv-endpoint")
        os.kill(agent, signal.SIGKILL)
        cluster.wait_until(
            lambda: "training again after" in cluster.log(job)[before:], "a killed agent is started again"
        )
        assert progress.wait_for_steps("it goes on on both nodes") > 50
        assert processes(cluster, 1, r"zero2all\.cli train"), "with the node whose agent was killed"

        # A node is drained, and the job requeued: it goes on on the other two.
        reached = steps(cluster.log(job))[-1]
        cluster.run("scontrol", "update", f"NodeName={cluster.nodes[1].name}", "State=DRAIN", "Reason=test")
        cluster.run("scontrol", "requeue", job)
        assert progress.wait_for_steps("the requeued job resumes", 180.0) >= reached - 50
        assert processes(cluster, 2, r"zero2all\.cli train"), "on the third node"
        assert not processes(cluster, 1, r"zero2all\.cli"), "the drained one is empty"

        # The time limit comes near: the job saves, requeues itself, and resumes where it has saved.
        reached = steps(cluster.log(job))[-1]
        before = len(cluster.log(job))
        cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
        cluster.wait_until(lambda: "requeued, and will resume" in cluster.log(job)[before:], "it is requeued", 150.0)
        cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED")
        saved = steps(cluster.log(job))[-1]
        assert saved >= reached
        assert progress.wait_for_steps("the job resumes by itself", 180.0) > saved - 5, "nothing is computed twice"

        # Cancelled is cancelled.
        cluster.run("scancel", job)
        cluster.wait_until(lambda: cluster.state(job) == "CANCELLED", "it is cancelled")
        cluster.wait_until(lambda: not processes(cluster, 0, r"zero2all\.cli"), "nothing is left")


@pytest.mark.timeout(300)
def test_a_job_on_slurm_that_is_done(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_yaml(tiny_recipe(workspace, f"out={tmp_path}")), encoding="utf-8")
    with slurm_cluster(tmp_path, 2) as cluster:
        job = submit(cluster, recipe, monkeypatch)
        cluster.wait_until(lambda: cluster.state(job) in ("COMPLETED", "FAILED"), "it ends", 150.0)
        assert cluster.state(job) == "COMPLETED", cluster.log(job)
        assert "trained 12 steps" in cluster.log(job)
        wrong = submit(cluster, recipe, monkeypatch, "train.no_such_key=1")
        cluster.wait_until(lambda: cluster.state(wrong) in ("COMPLETED", "FAILED"), "it ends", 90.0)
        assert "ExitCode=2:0" in cluster.run("scontrol", "show", "job", wrong)
