"""Starting ranks with the agent."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from typer.testing import CliRunner

from zero2all.base.environment import JOB_SECRET_VARIABLE
from zero2all.base.errors import UsageError
from zero2all.base.network.addresses import interface_for_address, is_local_address, local_address_for
from zero2all.base.processes import AGENT_PID
from zero2all.cli.main import app
from zero2all.cluster.launch import launcher
from zero2all.cluster.launch.job_secret import default_secret_file
from zero2all.cluster.launch.launcher import LaunchConfig
from zero2all.cluster.launch.rendezvous import Rendezvous
from zero2all.cluster.launch.rendezvous_client import RendezvousClient
from zero2all.cluster.launch.rendezvous_host import RendezvousConfig
from zero2all.cluster.launch.rendezvous_messages import RendezvousSettings
from zero2all.train import TrainSummary

WORDS = ["train", "my recipe.yaml", "train.steps=5"]


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

    def __init__(self, *of_an_agent: object) -> None:
        self.secrets.append(os.environ[JOB_SECRET_VARIABLE])
        assert os.environ[AGENT_PID] == str(os.getpid())
        self.failures = SimpleNamespace(leaves_job=False, poll_gpu_errors=nullcontext)

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
    monkeypatch.setattr("zero2all.cluster.launch.agent.Agent", LosesRendezvousOnce)
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
