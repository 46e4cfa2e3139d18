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
from zero2all.errors import UsageError
from zero2all.processes import AGENT_PID
from zero2all.resilience import launch as launch_module
from zero2all.resilience.addresses import address_towards, interface_of, is_ours
from zero2all.resilience.launch import Job, near_their_gpus
from zero2all.resilience.link import Link
from zero2all.resilience.rendezvous import Place, Rendezvous
from zero2all.resilience.rounds import Rules
from zero2all.resilience.secret import VARIABLE, default_file

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
    """Attempts so far; after so many that lost the rendezvous one ends well."""
    attempts: list[int] = []

    def stay(job: Job, directory: Path, rendezvous: Rendezvous) -> int:
        attempts.append(len(attempts))
        if len(attempts) <= times:
            raise RendezvousConnectionError("the connection is lost")
        return 0

    monkeypatch.setattr(Job, "_stay", stay)
    monkeypatch.setattr(launch_module, "PAUSE", 0.0)
    return attempts


def test_a_rendezvous_lost_now_and_then_does_not_end_a_long_job(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = lose_the_rendezvous(monkeypatch, times=3 * launch_module.LOST_STORE)
    monkeypatch.setattr(launch_module, "STEADY", 0.0)  # every attempt was connected for long
    assert Job(["--version"], procs=1).run() == 0
    assert len(attempts) == 3 * launch_module.LOST_STORE + 1


def test_a_rendezvous_lost_at_once_every_time_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts = lose_the_rendezvous(monkeypatch, times=100)
    assert Job(["--version"], procs=1).run() == 1
    assert len(attempts) == launch_module.LOST_STORE
    assert "given up" in capsys.readouterr().err


def test_waiting_long_for_a_rendezvous_that_never_answers_is_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def connect(self: Link, place: str, secret: str, patience: float) -> None:
        tries.append(place)
        raise RendezvousConnectionError(f"{place} does not answer")

    monkeypatch.setattr(Link, "__init__", connect)
    monkeypatch.setattr(launch_module, "PAUSE", 0.0)
    monkeypatch.setattr(launch_module, "STEADY", 0.0)
    assert Job(["--version"], procs=1).run() == 1
    assert len(tries) == launch_module.LOST_STORE


class LosesItOnce:
    """An agent whose rendezvous is lost in the first attempt and comes back with another secret."""

    secret_file: Path
    secrets: ClassVar[list[str]] = []
    leaves = False

    def __init__(self, *of_an_agent: object) -> None:
        self.secrets.append(os.environ[VARIABLE])
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
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    if by_user is not None:
        monkeypatch.setenv(VARIABLE, by_user)
    monkeypatch.setattr(launch_module, "PAUSE", 0.0)
    monkeypatch.setattr(LosesItOnce, "secrets", [])
    monkeypatch.setattr(LosesItOnce, "secret_file", default_file(), raising=False)
    monkeypatch.setattr("zero2all.resilience.agent.Agent", LosesItOnce)
    default_file().parent.mkdir()
    default_file().write_text("the secret of the first rendezvous")
    default_file().chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    before = dict(os.environ)
    assert Job(["--version"], procs=1, rendezvous=f"127.0.0.1:{port}").run() == 0
    files = ["the secret of the first rendezvous", "the secret of the second rendezvous"]
    assert LosesItOnce.secrets == ([by_user] * 2 if by_user else files)
    assert dict(os.environ) == before, "what is for the ranks stays with them"


def test_nodes_need_a_place_to_meet() -> None:
    with pytest.raises(UsageError, match="--rendezvous HOST:29500"):
        Job(WORDS, procs=8, nodes=(2, 2)).run()
    with pytest.raises(UsageError, match="write HOST:29500"):
        address_towards("head")


@pytest.mark.parametrize("nodes", ["3:2", "0:2", "some"])
def test_a_wrong_number_of_nodes_is_wrong_usage(nodes: str) -> None:
    done = CliRunner().invoke(app, ["launch", "--nodes", nodes, "--", *WORDS])
    assert done.exit_code == 2


def test_gloo_is_told_the_interface_by_which_nodes_reach_each_other() -> None:
    address = address_towards("127.0.0.1:29500")
    assert (address, interface_of(address)) == ("127.0.0.1", "lo")


def test_the_node_whose_address_is_given_holds_the_rendezvous() -> None:
    """Whatever its name resolves to; on Debian that is 127.0.1.1."""
    assert is_ours("127.0.0.1:29500")
    assert is_ours("127.0.1.1:29500")
    assert not is_ours("192.0.2.1:29500")  # for documentation: nobody has it


def test_a_name_that_others_would_look_for_at_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 29500))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
    with pytest.raises(UsageError, match=r"head means .* on this machine, where no other"):
        Rendezvous(Place("head:29500", patience=1), Rules((1, 2)), job="any", procs=1)


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
    job = yaml.safe_load(Job(WORDS, procs=8, nodes=(4, 4)).pytorch_job("image"))
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
    assert '--nodes 2:2 --rendezvous "$head:29500"' in script
    assert subprocess.run(["bash", "-n", str(to)]).returncode == 0
    assert "srun --export=ALL --kill-on-bad-exit=1" in script
    assert "srun --export=ALL --no-kill --kill-on-bad-exit=0" in Job(WORDS, 8, (2, 4), "head:29500").slurm()
    asked = Job(WORDS, 8, (2, 2), "head:1", restarts=2, hang_after=3600, grace=290)
    assert "--nodes 2:2 --rendezvous head:1 --restarts 2 --hang-after 3600 --grace 290 -- train" in asked.slurm()
    assert "--signal=B:TERM@300 " in asked.slurm(), "the ranks have all the time that Slurm gives, but for a margin"
    assert "--signal=B:TERM@120 " in script
    assert "--grace 110 -- train" in script
    with pytest.raises(
        UsageError, match="leave out --restarts, --hang-after, --grace, --rendezvous: in Kubernetes torchrun"
    ):
        asked.train_job("image")


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("sbatch") is None or subprocess.run(["sinfo", "-h"], capture_output=True).returncode != 0,
    reason="no Slurm that answers is here",
)
def test_slurm_runs_the_script(tmp_path: Path) -> None:
    """On one node: two ranks, each of which prints the version."""
    script = tmp_path / "job.sh"
    script.write_text(Job(["--version"], procs=2).slurm(), encoding="utf-8")
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
    script = Job(WORDS, procs=8, nodes=(2, 2)).slurm()
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
    named = Job(WORDS, 8, (2, 2), "login:29500", secret_file=Path("/home/me/my secret")).slurm()
    assert "--secret-file '/home/me/my secret'" in named
    assert "Z2A_JOB_SECRET=" not in named


@pytest.mark.parametrize(("rank", "said"), [(None, True), ("0", True), ("1", False)])
def test_one_rank_says_that_the_run_is_done(rank: str | None, said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.recipe.load_recipe", lambda *words: None)
    monkeypatch.setattr("zero2all.train.train", lambda *words, **options: {"steps": 7, "run": "there"})
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    done = CliRunner().invoke(app, ["train", "recipe.yaml"])
    assert done.exit_code == 0, done.output
    assert ("7 steps done" in done.stdout) == said


def test_ranks_stay_near_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert near_their_gpus() is None
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    options = near_their_gpus()
    assert options is not None
    assert options.affinity_mode == "node"
