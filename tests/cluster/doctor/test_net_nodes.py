"""``z2a launch -- doctor --net`` on three nodes, each with a network of its own: what is wrong with it is found."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.simulated_nodes import SimulatedNetwork, simulated_network
from tests.cluster.launch.nat_network import load_rules, unavailable_reason
from tests.cluster.launch.test_nat import DROP, job
from zero2all.base.console import say
from zero2all.base.findings import Finding
from zero2all.base.records import parse_record
from zero2all.base.units import parse_bytes
from zero2all.cluster.doctor.reachability import LARGE_PACKETS_VANISH

UNAVAILABLE = unavailable_reason()
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(UNAVAILABLE is not None, reason=f"no simulated nodes here: {UNAVAILABLE}"),
]
NODES = 3
SHAPED = 20_000_000  # bits per second


def checked(
    directory: Path,
    status: int,
    prepare: Callable[[SimulatedNetwork], None] = lambda network: None,
    *options: str,
    nodes: int = NODES,
) -> dict[str, Finding]:
    """What the first node prints, by what it is about; nodes are called 1, 2 and 3."""
    with simulated_network(nodes) as network, job(directory) as launched:
        prepare(network)
        options = ("--rdzv-endpoint", f"{network.nodes[0].ip}:29500", *options)
        for node in network.nodes:
            launched.launch(node, *options, nodes=nodes, procs=1, command=["doctor", "--net", "--json"])
        launched.wait(status)
        prefix = network.nodes[0].name.removesuffix("1")
    [line] = [line for line in (directory / "log-0").read_text().splitlines() if line.startswith("{")]
    findings = [parse_record(Finding, one, "finding") for one in json.loads(line.replace(prefix, ""))["findings"]]
    found = {finding.what: finding for finding in findings}
    assert len(found) == len(findings), "nothing is said twice"
    return found


def directions() -> set[str]:
    return {f"{one} to {other}" for one, other in itertools.permutations(range(1, NODES + 1), 2)}


def rate_of(finding: Finding) -> float:
    """Bytes per second."""
    return parse_bytes(finding.why.removesuffix("/s"))


def test_all_directions_their_bandwidth_and_mtus_that_differ(tmp_path: Path) -> None:
    def prepare(network: SimulatedNetwork) -> None:
        network.nodes[1].limit_bandwidth(f"{SHAPED}bit")  # of what it sends
        network.nodes[2].run("ip", "link", "set", "cable", "mtu", "9000")

    found = checked(tmp_path, 0, prepare)
    rates = {what: rate_of(found[what]) for what in directions()}
    for what, rate in rates.items():
        if what.startswith("2 to"):
            assert rate == pytest.approx(SHAPED / 8, rel=0.2), what
        elif "2" not in what:  # what comes back from node 2 waits behind what it sends
            assert rate > SHAPED, what
    assert found["MTU of 3"].why == "9000, where others have 1500"
    assert found["MTU of 3"].remedy == "ip link set dev cable mtu 1500"
    assert [finding for finding in found.values() if finding.level == "bad"] == []


def test_a_blocked_port_is_named_with_its_rule_and_direction(tmp_path: Path) -> None:
    def prepare(network: SimulatedNetwork) -> None:
        rule = "ip saddr 10.77.0.1 tcp dport 32768-60999"
        load_rules(network.nodes[1], DROP.replace("CHAIN", "input").replace("RULE", rule))

    found = checked(tmp_path, 1, prepare)
    [bad] = [finding for finding in found.values() if finding.level == "bad"]
    assert bad.what == "1 to 2"
    assert re.match(r"TCP 10\.77\.0\.2:\d+: no answer: a firewall drops it", bad.why)
    assert bad.remedy.startswith("on node 2 allow TCP 32768-60999 from 10.77.0.1")
    assert directions() <= found.keys(), "the others, and the same pair the other way round, are measured"


def test_a_link_with_a_smaller_mtu_that_says_nothing_is_a_problem_of_the_mtu(tmp_path: Path) -> None:
    def prepare(network: SimulatedNetwork) -> None:
        network._switch.run("ip", "link", "set", "port2", "mtu", "1200")  # of what the switch sends to node 2

    found = checked(tmp_path, 1, prepare)
    bad = {what: finding for what, finding in found.items() if finding.level == "bad"}
    assert bad.keys() == {"1 to 2", "3 to 2"}
    for finding in bad.values():
        assert finding.why.endswith(LARGE_PACKETS_VANISH)
        assert "lower the MTU of both" in finding.remedy
        assert "allow TCP" not in finding.remedy


NO_WIREGUARD = unavailable_reason("wg", "wireguard-go")


@pytest.mark.skipif(NO_WIREGUARD is not None, reason=f"no WireGuard here: {NO_WIREGUARD}")
def test_the_overlay_is_measured_like_a_direct_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, options, mtu in (("direct", [], 1500), ("overlay", ["--overlay", "wireguard"], 1420)):
        (tmp_path / name).mkdir()
        found = checked(tmp_path / name, 0, lambda network: None, *options, nodes=2)
        assert f"MTU {mtu};" in found["1"].why
        rates = [rate_of(found[what]) for what in ("1 to 2", "2 to 1")]
        assert min(rates) > 1e6
        with capsys.disabled():
            say(f"{name}: 1 to 2 {rates[0] / 1e6:.0f} MB/s, 2 to 1 {rates[1] / 1e6:.0f} MB/s")
