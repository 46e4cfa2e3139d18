"""Machines and networks with known faults."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.chaos.simulated_nodes import simulated_nodes, simulation_unavailable_reason
from zero2all.base.environment import JOB_SECRET_VARIABLE
from zero2all.cluster.doctor.pairs import (
    DeviceCheck,
    PairMeasurement,
    diagnose_pairs,
    min_rounds,
    round_robin_rounds,
    undecided_nodes,
)
from zero2all.cluster.doctor.preflight import check_node, compare_devices, compare_versions, run_checks
from zero2all.cluster.launch.job_secret import new_secret

GOOD = DeviceCheck("a card", 0.01, "abc", True)


def test_this_machine_is_checked(tmp_path: Path) -> None:
    found = {finding.what: finding for finding in run_checks(tmp_path)}
    assert {"memory", "/dev/shm", "open files", "disk", "devices"} <= set(found)
    assert found["disk"].level != "bad"
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_mac_is_checked_without_what_only_linux_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("zero2all.cluster.doctor.preflight.free_memory", lambda: None)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    checked: list[str] = []
    monkeypatch.setattr(
        "zero2all.cluster.doctor.preflight.check_device", lambda device: checked.append(device.type) or GOOD
    )
    found = {finding.what for finding in run_checks(tmp_path)}
    assert checked == ["cpu", "mps"]
    assert not found & {"memory", "open files"}


def test_a_directory_that_cannot_be_written_is_bad(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    disk = next(finding for finding in check_node(tmp_path / "file") if finding.what == "disk")
    assert disk.level == "bad"
    assert disk.remedy


def test_a_missing_interface_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib7")
    finding = next(finding for finding in check_node(tmp_path) if finding.what == "NCCL_SOCKET_IFNAME")
    assert (finding.level, "ib7 is not here" in finding.why) == ("bad", True)


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"digest": "abd"}, "bad", "different bits than its peers"),
        ({"steady": False}, "bad", "different bits each time"),
        ({"seconds": 0.02}, "note", "2.0 times as slow"),
    ],
)
def test_a_bad_device_is_named(change: dict[str, object], level: str, words: str) -> None:
    device_checks = {f"rank {number}": GOOD for number in range(3)} | {"rank 3": replace(GOOD, **change)}  # type: ignore[arg-type]
    wrong = [finding for finding in compare_devices(device_checks) if finding.level != "good"]
    assert [(finding.what, finding.level) for finding in wrong] == [("rank 3", level)]
    assert words in wrong[0].why
    assert wrong[0].remedy


def test_other_versions_are_named() -> None:
    nodes = {"a": {"torch": "2.13"}, "b": {"torch": "2.13"}, "c": {"torch": "2.12"}}
    assert [finding.what for finding in compare_versions(nodes)] == ["c, torch"]


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_every_node_meets_every_other_once(count: int) -> None:
    rounds = round_robin_rounds(count)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for pairs in rounds:
        members = [member for pair in pairs for member in pair]
        assert len(members) == len(set(members))


def measurements(
    count: int, bad: dict[int, float | None], links: dict[tuple[int, int], float | None]
) -> list[PairMeasurement]:
    """Two rounds, and more while some node is undecided, as ``measure_pairs`` does."""
    found: list[PairMeasurement] = []
    for turn, pairs in enumerate(round_robin_rounds(count)):
        if turn >= min_rounds(count) and not undecided_nodes(found, count):
            break
        for one, other in pairs:
            seconds: float | None = 0.001
            for known in [links.get((one, other), 0.001), bad.get(one, 0.001), bad.get(other, 0.001)]:
                seconds = None if known is None or seconds is None else max(seconds, known)
            found += [PairMeasurement(one, other, seconds), PairMeasurement(other, one, seconds)]
    return found


def diagnosed(count: int, bad: dict[int, float | None], links: dict[tuple[int, int], float | None]) -> list[str]:
    names = {number: f"n{number}" for number in range(count)}
    return sorted(finding.what for finding in diagnose_pairs(measurements(count, bad, links), names, count))


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_the_slow_node_and_the_dead_one_are_named(count: int) -> None:
    for node in range(count):
        for how in (1.0, None):
            assert diagnosed(count, {node: how}, {}) == [f"node n{node}"], (node, how)
    names = {number: f"n{number}" for number in range(count)}
    assert [finding.level for finding in diagnose_pairs(measurements(count, {}, {}), names, count)] == ["good"]


def test_a_slow_and_a_dead_node_at_once_and_a_link_between_two_good_nodes_are_named() -> None:
    assert diagnosed(8, {2: 1.0, 5: None}, {}) == ["node n2", "node n5"]
    one, other = round_robin_rounds(4)[0][0]
    assert diagnosed(4, {}, {(one, other): None}) == [f"link n{one} to n{other}"]


def test_a_clock_that_is_off_is_named() -> None:
    found = diagnose_pairs([PairMeasurement(0, 1, 0.001, 5.0), PairMeasurement(1, 0, 0.001, -5.0)], {0: "a", 1: "b"}, 2)
    assert [finding.what for finding in found] == ["clock of b"]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    simulation_unavailable_reason() is not None,
    reason=f"no simulated nodes here: {simulation_unavailable_reason()}",
)
def test_in_a_real_network_the_slow_node_and_the_dead_link_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four nodes and a store on a fifth machine. The third sends slowly; the first and the fourth have no route."""
    with simulated_nodes(5) as (*nodes, login):
        monkeypatch.setenv(JOB_SECRET_VARIABLE, new_secret())
        store = subprocess.Popen(
            login.command(
                sys.executable, "-m", "zero2all.cli", "launch", "--rendezvous-only", "--rdzv-listen", login.ip
            )
        )
        nodes[2].limit_bandwidth("2mbit")
        nodes[0].run("ip", "route", "add", "blackhole", f"{nodes[3].ip}/32")
        words = ["launch", "--procs", "1", "--nodes", "4", "--rendezvous", f"{login.ip}:29500", "--restarts", "0"]
        logs = [open(tmp_path / f"{number}.txt", "w+") for number in range(4)]  # noqa: SIM115
        jobs = [
            subprocess.Popen(
                node.command(sys.executable, "-m", "zero2all.cli", *words, "--", "doctor", "--dir", str(tmp_path)),
                stdout=log,
                stderr=log,
            )
            for node, log in zip(nodes, logs, strict=True)
        ]
        try:
            assert [job.wait(600) for job in jobs] == [1, 1, 1, 1]
        finally:
            for process in (*jobs, store):
                process.kill()
                process.wait()
        text = "\n".join((tmp_path / f"{number}.txt").read_text() for number in range(4))
        bad = [line for line in text.splitlines() if line.startswith("BAD")]
        assert len(bad) == 2, text
        assert any("(node 2)" in line and "times as slow as others" in line for line in bad), bad
        assert any("link" in line and "(node 0)" in line and "(node 3)" in line for line in bad), bad
