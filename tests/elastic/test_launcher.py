"""Starting ranks: the agent for real, Slurm for real where it is installed, Kubernetes as files."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from typer.testing import CliRunner

from zero2all.cli.main import app
from zero2all.elastic import launcher
from zero2all.elastic.addresses import interface_for_address, is_local_address, local_address_for
from zero2all.elastic.job_secret import default_secret_file
from zero2all.elastic.launcher import LaunchConfig
from zero2all.elastic.rendezvous import Rendezvous, RendezvousConfig
from zero2all.elastic.rendezvous_client import RendezvousClient
from zero2all.elastic.rendezvous_state import RendezvousSettings
from zero2all.environment import JOB_SECRET_VARIABLE
from zero2all.errors import UsageError
from zero2all.processes import AGENT_PID
from zero2all.train import TrainSummary

WORDS = ["train", "my recipe.yaml", "train.steps=5"]


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "zero2all.cli", "launch", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_every_rank_runs_the_command() -> None:
    done = launch("--procs", "2", "--", "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("zero2all ") == 2


@pytest.mark.slow
def test_a_command_that_fails_fails_the_launch() -> None:
    done = launch("--procs", "1", "--", "recipe", "show", "no-such-file.yaml")
    assert done.returncode == 2, done.stderr
    assert "no recipe at no-such-file.yaml" in done.stderr
    assert "not tried again" in done.stderr


def lose_the_rendezvous(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Attempts so far; after ``times`` that lost the rendezvous one succeeds."""
    attempts: list[int] = []

    def run_agent(job: LaunchConfig, directory: Path, rendezvous: Rendezvous) -> int:
        attempts.append(len(attempts))
        if len(attempts) <= times:
            raise RendezvousConnectionError("the connection is lost")
        return 0

    monkeypatch.setattr(LaunchConfig, "_run_agent", run_agent)
    monkeypatch.setattr(launcher, "RECONNECT_DELAY", 0.0)
    return attempts


def test_a_rendezvous_lost_now_and_then_does_not_end_a_long_job(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = lose_the_rendezvous(monkeypatch, times=3 * launcher.MAX_RENDEZVOUS_LOSSES)
    monkeypatch.setattr(launcher, "STABLE_AFTER", 0.0)  # every attempt was connected for long
    assert LaunchConfig(["--version"], procs=1).run() == 0
    assert len(attempts) == 3 * launcher.MAX_RENDEZVOUS_LOSSES + 1


def test_a_rendezvous_lost_at_once_every_time_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts = lose_the_rendezvous(monkeypatch, times=100)
    assert LaunchConfig(["--version"], procs=1).run() == 1
    assert len(attempts) == launcher.MAX_RENDEZVOUS_LOSSES
    assert "given up" in capsys.readouterr().err


def test_waiting_long_for_a_rendezvous_that_never_answers_is_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def connect(self: RendezvousClient, endpoint: str, secret: str, patience: float) -> None:
        tries.append(endpoint)
        raise RendezvousConnectionError(f"{endpoint} does not answer")

    monkeypatch.setattr(RendezvousClient, "__init__", connect)
    monkeypatch.setattr(launcher, "RECONNECT_DELAY", 0.0)
    monkeypatch.setattr(launcher, "STABLE_AFTER", 0.0)
    assert LaunchConfig(["--version"], procs=1).run() == 1
    assert len(tries) == launcher.MAX_RENDEZVOUS_LOSSES


class LosesRendezvousOnce:
    """An agent whose rendezvous is lost in the first attempt and comes back with another secret."""

    secret_file: Path
    secrets: ClassVar[list[str]] = []
    leaves_job = False

    def __init__(self, *of_an_agent: object) -> None:
        self.secrets.append(os.environ[JOB_SECRET_VARIABLE])
        assert os.environ[AGENT_PID] == str(os.getpid())

    def run(self) -> RunResult:
        if len(self.secrets) > 1:
            return RunResult(WorkerState.SUCCEEDED)
        self.secret_file.write_text("the secret of the second rendezvous")
        raise RendezvousConnectionError("the connection is lost")


@pytest.mark.parametrize("by_user", [None, "a secret that the user has set"])
def test_a_rendezvous_that_comes_back_with_another_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_user: str | None
) -> None:
    monkeypatch.delenv(JOB_SECRET_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    if by_user is not None:
        monkeypatch.setenv(JOB_SECRET_VARIABLE, by_user)
    monkeypatch.setattr(launcher, "RECONNECT_DELAY", 0.0)
    monkeypatch.setattr(LosesRendezvousOnce, "secrets", [])
    monkeypatch.setattr(LosesRendezvousOnce, "secret_file", default_secret_file(), raising=False)
    monkeypatch.setattr("zero2all.elastic.agent.Agent", LosesRendezvousOnce)
    default_secret_file().parent.mkdir()
    default_secret_file().write_text("the secret of the first rendezvous")
    default_secret_file().chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    before = dict(os.environ)
    assert LaunchConfig(["--version"], procs=1, rdzv_endpoint=f"127.0.0.1:{port}").run() == 0
    files = ["the secret of the first rendezvous", "the secret of the second rendezvous"]
    assert LosesRendezvousOnce.secrets == ([by_user] * 2 if by_user else files)
    assert dict(os.environ) == before, "what is for the ranks stays with them"


def test_several_nodes_need_a_rendezvous() -> None:
    with pytest.raises(UsageError, match="--rdzv-endpoint HOST:29500"):
        LaunchConfig(WORDS, procs=8, nodes=(2, 2)).run()
    with pytest.raises(UsageError, match="write HOST:29500"):
        local_address_for("head")


@pytest.mark.parametrize("nodes", ["3:2", "0:2", "some"])
def test_a_wrong_number_of_nodes_is_wrong_usage(nodes: str) -> None:
    done = CliRunner().invoke(app, ["launch", "--nodes", nodes, "--", *WORDS])
    assert done.exit_code == 2


def test_gloo_gets_the_interface_at_which_nodes_reach_each_other() -> None:
    address = local_address_for("127.0.0.1:29500")
    assert (address, interface_for_address(address)) == ("127.0.0.1", "lo")


def test_the_node_whose_address_is_given_hosts_the_rendezvous() -> None:
    """Whatever its name resolves to; on Debian that is 127.0.1.1."""
    assert is_local_address("127.0.0.1:29500")
    assert is_local_address("127.0.1.1:29500")
    assert not is_local_address("192.0.2.1:29500")  # TEST-NET-1: not assigned


def test_a_host_name_that_resolves_to_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 29500))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
    with pytest.raises(UsageError, match=r"head resolves to .* on this machine, where no other"):
        Rendezvous(RendezvousConfig("head:29500", patience=1), RendezvousSettings((1, 2)), job_id="any", procs=1)


def test_a_train_job_for_kubernetes() -> None:
    done = CliRunner().invoke(
        app, ["launch", "--procs", "8", "--nodes", "4", "--gpus", "8", "--emit", "k8s", "--", *WORDS]
    )
    job = yaml.safe_load(done.stdout)
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (4, 8)
    assert trainer["command"] == ["torchrun", "--no-python", "z2a", *WORDS]


def test_a_pytorch_job_for_kubernetes() -> None:
    job = yaml.safe_load(LaunchConfig(WORDS, procs=8, nodes=(4, 4)).pytorch_job("image"))
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert (replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == (1, 3)
    container = replicas["Worker"]["template"]["spec"]["containers"][0]
    assert container["name"] == "pytorch", "the operator looks for this name"
    assert container["command"][-3:] == WORDS


def test_the_slurm_script_quotes_and_is_written(tmp_path: Path) -> None:
    to = tmp_path / "job.sh"
    words = ["launch", "--procs", "8", "--nodes", "2", "--emit", "slurm", "--to", str(to), "--json", "--", *WORDS]
    done = CliRunner().invoke(app, words)
    assert json.loads(done.stdout)["to"] == str(to)
    script = to.read_text(encoding="utf-8")
    assert "-- train 'my recipe.yaml' train.steps=5" in script
    assert '--nnodes 2:2 --rdzv-endpoint "$head:29500"' in script
    assert subprocess.run(["bash", "-n", str(to)]).returncode == 0
    assert "srun --export=ALL --kill-on-bad-exit=1" in script
    assert (
        "srun --export=ALL --no-kill --kill-on-bad-exit=0"
        in LaunchConfig(WORDS, 8, (2, 4), "head:29500").slurm_script()
    )
    asked = LaunchConfig(WORDS, 8, (2, 2), "head:1", max_restarts=2, hang_after=3600, grace=290)
    assert (
        "--nnodes 2:2 --rdzv-endpoint head:1 --max-restarts 2 --hang-after 3600 --grace 290 -- train"
        in asked.slurm_script()
    )
    assert "--signal=B:TERM@300 " in asked.slurm_script(), "the ranks have the time that Slurm gives, minus a margin"
    assert "--signal=B:TERM@120 " in script
    assert "--grace 110 -- train" in script
    with pytest.raises(
        UsageError, match="leave out --max-restarts, --hang-after, --grace, --rdzv-endpoint: in Kubernetes torchrun"
    ):
        asked.train_job("image")


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("sbatch") is None or subprocess.run(["sinfo", "-h"], capture_output=True).returncode != 0,
    reason="no working Slurm here",
)
def test_slurm_runs_the_script(tmp_path: Path) -> None:
    """On one node: two ranks, each of which prints the version."""
    script = tmp_path / "job.sh"
    script.write_text(LaunchConfig(["--version"], procs=2).slurm_script(), encoding="utf-8")
    tools = tmp_path / "bin"  # a z2a that is this checkout, wherever the tests run
    tools.mkdir()
    z2a = tools / "z2a"
    z2a.write_text(f'#!/bin/sh\nexec {sys.executable} -m zero2all.cli "$@"\n', encoding="utf-8")
    z2a.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sbatch", "--parsable", "--chdir", str(tmp_path), str(script)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    log = tmp_path / f"z2a-{done.stdout.strip()}.log"
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and not (log.exists() and log.read_text().count("zero2all ") == 2):
        time.sleep(1)
    assert log.read_text().count("zero2all ") == 2, log.read_text()


def test_the_slurm_script_gives_the_nodes_a_secret(tmp_path: Path) -> None:
    script = LaunchConfig(WORDS, procs=8, nodes=(2, 2)).slurm_script()
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho head-node\n")
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$Z2A_JOB_SECRET"; echo "$@"\n')
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "x"}
    runs = [subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment) for _ in range(2)]
    (first, words), (second, _) = (done.stdout.splitlines() for done in runs)
    assert len(first) == 64, runs[0].stderr
    assert first != second
    assert first not in words, "ps would show it"
    named = LaunchConfig(WORDS, 8, (2, 2), "login:29500", secret_file=Path("/home/me/my secret")).slurm_script()
    assert "--secret-file '/home/me/my secret'" in named
    assert "Z2A_JOB_SECRET=" not in named


@pytest.mark.parametrize(("rank", "printed"), [(None, True), ("0", True), ("1", False)])
def test_one_rank_reports_that_the_run_is_done(
    rank: str | None, printed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero2all.recipe.load_recipe", lambda *words: None)
    summary = TrainSummary(run="there", steps=7, resumed_at=0, loss=2.5, tokens=70, parameters=9, goodput=0.5)
    monkeypatch.setattr("zero2all.train.train", lambda *words, **options: summary)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    done = CliRunner().invoke(app, ["train", "recipe.yaml"])
    assert done.exit_code == 0, done.output
    assert ("trained 7 steps" in done.stdout) == printed
