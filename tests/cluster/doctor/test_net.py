"""What ``z2a doctor --net`` says."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from zero2all.cli.main import app
from zero2all.cluster.doctor.net_check import (
    Direction,
    NodeNetwork,
    direction_findings,
    fabric_settings,
    missing_nodes,
    mtu_findings,
    nccl_findings,
)
from zero2all.cluster.doctor.pairs import PairMeasurement
from zero2all.cluster.doctor.reachability import LARGE_PACKETS_VANISH, Target, Unreachable
from zero2all.cluster.doctor.topology import Nic

NAMES = {0: "a", 1: "b", 2: "c"}
TARGET = Target("10.0.0.2", 40000, "data", "32768-60999")


def node(name: str, mtu: int) -> NodeNetwork:
    return NodeNetwork(name, TARGET, "eth0", mtu)


def test_a_missing_firewall_rule_is_one_line() -> None:
    broken = Unreachable("a", "10.0.0.1", "b", TARGET, "no answer")
    [finding] = direction_findings([Direction(0, 1, broken)], NAMES)
    assert finding.level == "bad"
    assert (finding.what, finding.why) == ("a to b", "TCP 10.0.0.2:40000: no answer")
    assert finding.remedy.startswith("on node b allow TCP 32768-60999 from 10.0.0.1")
    mapped = Unreachable("a", "10.0.0.1", "b", Target("host", 30501, "store", "29501"), "refused", is_mapped=True)
    [finding] = direction_findings([Direction(0, 1, mapped)], NAMES)
    assert (
        finding.remedy == "on node b allow TCP 29501 from 10.0.0.1, and check that the port map leads host:30501 to it"
    )
    hole = Unreachable("a", "10.0.0.1", "b", TARGET, LARGE_PACKETS_VANISH)
    assert "lower the MTU of both" in hole.fix, "a firewall rule would change nothing"
    overlay = Unreachable("a", "100.64.0.1", "b", TARGET, "no answer", overlay_endpoint="host:31820")
    assert "map or open UDP host:31820 to node b" in overlay.fix


def test_a_slow_direction_is_noted() -> None:
    rates = [(0, 1, 1e9), (1, 0, 1e9), (0, 2, 1e9), (2, 0, 1e8), (1, 2, 1e9), (2, 1, 1e9)]
    found = direction_findings([Direction(one, other, None, rate) for one, other, rate in rates], NAMES)
    assert [finding.what for finding in found if finding.level == "note"] == ["c to a"]
    many = [Direction(one, other, None, 1e9) for one in range(5) for other in range(5) if one != other]
    assert [finding.what for finding in direction_findings(many, dict(enumerate("abcde")))] == ["bandwidth"]


def test_different_mtus_are_noted_with_the_command() -> None:
    [finding] = mtu_findings([node("a", 1500), node("b", 9000)])
    assert (finding.what, finding.remedy) == ("MTU of b", "ip link set dev eth0 mtu 1500")
    assert mtu_findings([node("a", 1500), node("b", 1500)]) == []


def test_gloo_is_proposed_where_tcp_works_and_nccl_does_not() -> None:
    measured = [PairMeasurement(0, 1, None), PairMeasurement(1, 0, None), PairMeasurement(0, 2, 0.1)]
    [finding] = nccl_findings(measured, [], NAMES)
    assert finding.what == "NCCL between a and b"
    assert "--backend gloo" in finding.remedy
    broken = Unreachable("a", "10.0.0.1", "b", TARGET, "no answer")
    assert nccl_findings(measured, [Direction(0, 1, broken)], NAMES) == [], "then the network is the cause"


def test_settings_for_infiniband() -> None:
    def card(name: str, layer: str, state: str) -> Nic:
        return Nic(name, 0, layer, state, "400 Gb/sec", Path("/"))

    assert list(fabric_settings([], has_devices=True)) == []
    [finding] = fabric_settings(
        [card("mlx5_0", "InfiniBand", "ACTIVE"), card("mlx5_1", "InfiniBand", "DOWN")], has_devices=True
    )
    assert finding.why == "NCCL_IB_HCA=mlx5_0"
    [finding] = fabric_settings([card("mlx5_0", "Ethernet", "ACTIVE")], has_devices=True)
    assert finding.why == "NCCL_IB_HCA=mlx5_0 NCCL_IB_GID_INDEX=3"
    [finding] = fabric_settings([card("mlx5_0", "InfiniBand", "DOWN")], has_devices=True)
    assert finding.remedy == "set NCCL_IB_DISABLE=1"
    [finding] = fabric_settings([card("mlx5_0", "InfiniBand", "ACTIVE")], has_devices=False)
    assert "/dev/infiniband" in finding.remedy


def test_a_node_that_says_nothing_is_named() -> None:
    assert [finding.what for finding in missing_nodes({0: node("a", 1500)}, 2)] == ["node 1"]


def test_one_machine_lists_its_interfaces() -> None:
    done = CliRunner().invoke(app, ["doctor", "--net"], env={"WORLD_SIZE": "1"})
    assert done.exit_code == 0, done.output
    assert "interface lo: 127.0.0.1, MTU" in done.stdout
