"""Nodes that a port map separates: torchrun hangs, ``z2a launch`` trains or says why not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.simulated_nodes import SimulatedNode, simulated_nodes
from tests.chaos.workspace import build_workspace, workspace_recipe
from tests.cluster.launch.nat_network import (
    HOST,
    INSIDE,
    RENDEZVOUS,
    RENDEZVOUS_INSIDE,
    STORE,
    STORE_INSIDE,
    UDP,
    UDP_INSIDE,
    NatNetwork,
    load_rules,
    nat_network,
    unavailable_reason,
)
from zero2all.base.environment import JOB_SECRET_VARIABLE
from zero2all.cluster.launch.job_secret import new_secret
from zero2all.recipe import recipe_yaml

UNAVAILABLE = unavailable_reason("wg", "wireguard-go")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(UNAVAILABLE is not None, reason=f"no NAT here: {UNAVAILABLE}"),
]
WIREGUARD = ["--overlay", "wireguard"]
STEPS = 4
SUM = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").write(str(int(total)))
dist.destroy_process_group()  # gloo may abort in a process that ends without it
"""
WAIT = "import sys, time; open(sys.argv[1], 'w'); time.sleep(600)"
DROP = """
table inet filter {
  chain CHAIN {
    type filter hook CHAIN priority 0;
    ct state new RULE drop
  }
}
"""


class Job:
    """The processes of a job, one on each node, with a log for each."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.processes = directory, list[subprocess.Popen[bytes]]()
        self.environment = {**os.environ, JOB_SECRET_VARIABLE: new_secret(), "OMP_NUM_THREADS": "1"}

    def start(self, node: SimulatedNode, *words: str) -> None:
        with open(self.directory / f"log-{len(self.processes)}", "wb") as log:
            command = node.command(sys.executable, "-m", *words)
            self.processes.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def launch(self, node: SimulatedNode, *options: str, nodes: int, command: list[str], procs: int = 2) -> None:
        counts = ["--nnodes", str(nodes), "--nproc-per-node", str(procs)]
        self.start(node, "zero2all.cli", "launch", *counts, *options, "--", *command)

    def launch_all(self, network: NatNetwork, inside: list[str], *options: str, command: list[str]) -> None:
        """On every node; the one inside hosts the rendezvous."""
        count, endpoint = 1 + len(network.outside), ["--rdzv-endpoint", f"{HOST}:{RENDEZVOUS}"]
        hosts = ["--rdzv-listen", f"{INSIDE}:{RENDEZVOUS_INSIDE}"]
        self.launch(network.inside, *endpoint, *hosts, *inside, *options, nodes=count, command=command)
        for node in network.outside:
            self.launch(node, *endpoint, *options, nodes=count, command=command)

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("log-*")))

    def wait(self, status: int) -> str:
        for process in self.processes:
            assert process.wait(400) == status, self.logs()
        return self.logs()


@contextmanager
def job(directory: Path) -> Iterator[Job]:
    found = Job(directory)
    try:
        yield found
    finally:
        for process in found.processes:
            process.kill()
            process.wait()


def mapped(overlay: bool) -> list[str]:
    if overlay:
        return ["--advertise", f"{HOST}:{UDP}", "--listen", str(UDP_INSIDE)]
    return ["--advertise", f"{HOST}:{STORE}", "--listen", str(STORE_INSIDE)]


def test_torchrun_with_the_mapped_address_hangs(tmp_path: Path) -> None:
    """A container cannot reach its own mapping, so that no address is right on both nodes."""
    (tmp_path / "sum.py").write_text(SUM)
    with nat_network(1, routed=True) as network, job(tmp_path) as torchrun:
        for rank, node in enumerate((network.inside, *network.outside)):
            place = ["--master-addr", HOST, "--master-port", str(RENDEZVOUS), "--node-rank", str(rank)]
            words = ["torch.distributed.run", "--nnodes", "2", *place, str(tmp_path / "sum.py"), str(tmp_path)]
            torchrun.start(node, *words)
        time.sleep(40)
        assert [process.poll() for process in torchrun.processes] == [None, None], torchrun.logs()
        assert not (tmp_path / "0").exists()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("workspace")
    build_workspace(root, seed=0)
    return root


@pytest.mark.parametrize("overlay", [False, True], ids=["advertise", "wireguard"])
@pytest.mark.parametrize("nodes", [2, 3])
def test_a_job_trains_through_a_port_map(workspace: Path, tmp_path: Path, nodes: int, overlay: bool) -> None:
    recipe = tmp_path / "recipe.yaml"
    overrides = [f"train.steps={STEPS}", "train.batch_tokens=384"]  # divides by 4 and 6 ranks
    recipe.write_text(recipe_yaml(workspace_recipe(workspace, tmp_path / "out", *overrides)))
    with nat_network(nodes - 1, routed=not overlay) as network, job(tmp_path) as training:
        options = WIREGUARD if overlay else []
        training.launch_all(network, mapped(overlay), *options, command=["train", str(recipe)])
        log = training.wait(0)
        assert f"trained {STEPS} steps" in log
        assert f"dp_shard {2 * nodes}" in log
        for node in (network.inside, *network.outside):
            assert node.processes() == {}
            assert "z2a-" not in node.run("ip", "-brief", "link")
    keys = re.findall(r"[A-Za-z0-9+/]{43}=", log)
    assert keys == [], "no key is logged"


def test_without_an_overlay_strict_nat_is_an_error_that_proposes_it(tmp_path: Path) -> None:
    with nat_network(1, routed=False) as network, job(tmp_path) as launched:
        launched.launch_all(network, mapped(False), command=["--version"])
        log = launched.wait(1)
    assert re.search(rf"\(10\.77\.0\.2\) cannot reach node \S+ at {INSIDE}:\d+ \(TCP, gloo and NCCL\)", log), log
    assert "use --overlay wireguard" in log


@pytest.mark.parametrize(
    ("chain", "rule", "direction"),
    [
        (
            "input",
            f"tcp dport {STORE_INSIDE}",
            rf"\(10.77.0.2\) cannot reach node \S+-inside at {HOST}:{STORE} \(TCP, the store of the ranks\): no .*"
            rf"on node \S+-inside allow TCP {STORE_INSIDE} from 10.77.0.2",
        ),
        (
            "output",
            "ip daddr 10.77.0.2 tcp dport 1024-65535",
            rf"-inside \({INSIDE}\) cannot reach node \S+ at 10.77.0.2:\d+ \(TCP, gloo and NCCL\).*"
            rf"on node \S+ allow TCP \d+-\d+ from {INSIDE}",
        ),
    ],
    ids=["port", "direction"],
)
def test_a_wrong_firewall_rule_is_named_in_seconds(tmp_path: Path, chain: str, rule: str, direction: str) -> None:
    with nat_network(1, routed=True) as network, job(tmp_path) as launched:
        load_rules(network.inside, DROP.replace("CHAIN", chain).replace("RULE", rule))
        launched.launch_all(network, mapped(False), command=["--version"])
        log = launched.wait(1)
    assert len(re.findall(direction, log)) == 2, f"both nodes say so: {log}"
    assert log.count("cannot reach node") == 2, f"and nothing else: {log}"
    seconds = [float(found) for found in re.findall(r"found in ([\d.]+) s", log)]
    assert len(seconds) == 2
    assert max(seconds) < 20


def test_a_wrong_endpoint_is_said_before_the_node_gives_up(tmp_path: Path) -> None:
    with nat_network(1, routed=False) as network, job(tmp_path) as launched:
        endpoint = ["--rdzv-endpoint", f"{HOST}:1", "--rdzv-timeout", "60"]
        launched.launch(network.outside[0], *endpoint, nodes=2, command=["--version"])
        deadline = time.monotonic() + 60  # of which most is the start of Python on a busy machine
        while f"cannot reach the rendezvous at {HOST}:1 (TCP)" not in launched.logs():
            assert time.monotonic() < deadline, launched.logs()
            time.sleep(0.2)


def test_a_node_behind_nat_without_a_mapped_port(tmp_path: Path) -> None:
    """Its packets open the way, and those that keep it open."""
    (tmp_path / "sum.py").write_text(SUM)
    with nat_network(1, routed=False) as network, job(tmp_path) as launched:
        [outside] = network.outside
        for node in (network.inside, outside):
            command = ["python", str(tmp_path / "sum.py"), str(tmp_path)]
            launched.launch(node, "--rdzv-endpoint", f"{outside.ip}:29500", *WIREGUARD, nodes=2, command=command)
        launched.wait(0)
        assert [(tmp_path / str(rank)).read_text() for rank in range(4)] == ["4"] * 4


def test_nothing_is_left_of_an_overlay_after_ctrl_c_and_after_a_kill(tmp_path: Path) -> None:
    with nat_network(1, routed=False) as network, job(tmp_path) as launched:
        (tmp_path / "wait.py").write_text(WAIT)
        command = ["python", str(tmp_path / "wait.py"), str(tmp_path / "running")]
        launched.launch_all(network, mapped(True), *WIREGUARD, command=command)
        deadline = time.monotonic() + 200
        while not (tmp_path / "running").exists():
            assert time.monotonic() < deadline, launched.logs()
            time.sleep(0.1)
        nodes = (network.inside, *network.outside)
        assert all("z2a-" in node.run("ip", "-brief", "link") for node in nodes)
        launched.processes[1].kill()
        launched.processes[0].send_signal(signal.SIGINT)
        for node in nodes:
            while node.processes() or "z2a-" in node.run("ip", "-brief", "link"):
                assert time.monotonic() < deadline, node.processes()
                time.sleep(0.1)


def test_nodes_with_ipv6_only(tmp_path: Path) -> None:
    (tmp_path / "sum.py").write_text(SUM)
    with simulated_nodes(2) as nodes, job(tmp_path) as launched:
        for number, node in enumerate(nodes, 1):
            node.run("ip", "address", "flush", "dev", "cable")
            node.run("ip", "address", "add", f"fd00::{number}/64", "dev", "cable", "nodad")
        for node in nodes:
            command = ["python", str(tmp_path / "sum.py"), str(tmp_path)]
            launched.launch(node, "--rdzv-endpoint", "[fd00::1]:29500", nodes=2, command=command, procs=1)
        launched.wait(0)
        assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2"] * 2
