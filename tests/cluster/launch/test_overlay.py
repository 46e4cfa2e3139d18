"""The WireGuard interface of a node, and that nothing is left of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from ipaddress import ip_address, ip_network

import pytest

from tests.chaos.simulated_nodes import SimulatedNode, simulated_nodes
from tests.cluster.launch.nat_network import unavailable_reason
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.network.addresses import NodeAddress
from zero2all.cluster.launch.overlay import (
    CONTROL_SOCKETS,
    OverlayPeer,
    WireGuardOverlay,
    _refuse_same_addresses,
    overlay_address,
)

UNAVAILABLE = unavailable_reason("wg", "wireguard-go")
needs_wireguard = pytest.mark.skipif(UNAVAILABLE is not None, reason=f"no WireGuard here: {UNAVAILABLE}")
GUARD = [sys.executable, "-m", "zero2all.cluster.launch.overlay"]
PARENT = "import subprocess, sys; subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE); sys.stdin.read()"


def test_a_node_keeps_its_address_and_others_have_another() -> None:
    address = overlay_address("job", "node1", "10.0.0.1")
    assert address == overlay_address("job", "node1", "10.0.0.1")
    assert ip_address(address) in ip_network("100.64.0.0/10")
    others = {overlay_address("job", f"node{number}", "172.17.0.2") for number in range(100)}
    assert len(others | {address, overlay_address("other job", "node1", "10.0.0.1")}) == 102


def test_two_nodes_with_one_address_are_named() -> None:
    one, other = (OverlayPeer(name, f"key of {name}", "100.64.0.1", "10.0.0.1:1", False) for name in "ab")
    with pytest.raises(Z2aError, match="nodes a and b get the same overlay address"):
        _refuse_same_addresses([one, other])


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(UsageError, match="needs wg, ip: apt-get install wireguard-tools iproute2 wireguard-go"):
        WireGuardOverlay("job", NodeAddress("127.0.0.1", "127.0.0.1"))


@pytest.fixture(scope="module")
def node() -> Iterator[SimulatedNode]:
    with simulated_nodes(1) as [found]:
        yield found


@needs_wireguard
def test_an_interface_without_privileges_is_an_error_that_says_what_is_needed(node: SimulatedNode) -> None:
    words = node.command("setpriv", "--bounding-set=-net_admin", *GUARD, "z2a-no-right")
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert "--cap-add NET_ADMIN --device /dev/net/tun" in done.stdout
    assert "z2a-no-right" not in node.run("ip", "link")


@needs_wireguard
@pytest.mark.parametrize("end", ["closed", "killed"])
def test_an_interface_is_gone_when_its_agent_ends_or_is_killed(node: SimulatedNode, end: str) -> None:
    name = f"z2a-t-{end}"
    words = node.command(sys.executable, "-c", PARENT, *GUARD, name)
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout.readline().strip() in ("kernel", "wireguard-go")
        assert name in node.run("ip", "link")
        if end == "killed":
            agent.kill()
        agent.stdin.close()
        agent.wait(60)
    deadline = time.monotonic() + 30
    while name in node.run("ip", "link") or node.processes() or (CONTROL_SOCKETS / f"{name}.sock").exists():
        assert time.monotonic() < deadline, node.processes()
        time.sleep(0.05)
