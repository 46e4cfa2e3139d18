"""``z2a doctor``: checks of one node or of all nodes of a job. Every finding comes with a fix."""

from __future__ import annotations

import os
import socket
import statistics
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from zero2all.doctor.net_check import NetCheck, check_own_network
from zero2all.doctor.network_check import exchange_through_store, measure_pairs
from zero2all.doctor.node_check import check_device, check_node, library_versions
from zero2all.doctor.pairs import DeviceCheck, PairMeasurement, diagnose_pairs
from zero2all.doctor.reachability import Target
from zero2all.doctor.topology import binding_findings, check_binding, check_topology
from zero2all.findings import Finding
from zero2all.hardware import MPS, pick_device
from zero2all.records import parse_record
from zero2all.torch_private import Store

SLOW_DEVICE_FACTOR = 1.5  # times as long as its peers


@dataclass(frozen=True)
class RankFacts:
    """What a rank tells the others."""

    node: str
    versions: dict[str, str]
    compute: DeviceCheck
    findings: list[Finding]
    binding: Finding | None


def run_checks(directory: Path, store: Store | None = None) -> list[Finding]:
    """On one machine all of its devices; with a store one device per rank, and the network between the nodes."""
    if store is not None:
        return _check_all_nodes(directory, store)
    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    devices = gpus or [torch.device("cpu")]
    if torch.backends.mps.is_available():
        devices.append(torch.device(MPS))
    device_checks = {f"device {device}": check_device(device) for device in devices}
    return [*check_node(directory), *check_topology(), *compare_devices(device_checks)]


def _check_all_nodes(directory: Path, store: Store) -> list[Finding]:
    """Every rank takes part, and all get the same findings."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    each = int(os.environ["LOCAL_WORLD_SIZE"])
    device = pick_device("auto")
    node = f"{socket.gethostname()} (node {rank // each})"
    first = rank % each == 0
    own = [*check_node(directory), *check_topology()] if first else []
    facts = RankFacts(node, library_versions(), check_device(device), own, check_binding())
    exchanged = exchange_through_store(store, "facts", rank, world, asdict(facts))
    facts_by_rank = {number: parse_record(RankFacts, value, f"rank {number}") for number, value in exchanged.items()}
    findings = [Finding("bad", f"rank {number}", "did not report: its node or its connection is lost",
                        "check that node") for number in range(world) if number not in facts_by_rank]  # fmt: skip
    for fact in facts_by_rank.values():
        findings += [replace(one, what=f"{fact.node}, {one.what}") for one in fact.findings if one.level != "good"]
    device_checks = {f"rank {number} on {fact.node}": fact.compute for number, fact in facts_by_rank.items()}
    findings += binding_findings((f"rank {number}", fact.binding) for number, fact in facts_by_rank.items())
    findings += compare_devices(device_checks)
    findings += compare_versions({fact.node: fact.versions for fact in facts_by_rank.values()})
    # Between nodes the first rank of each; on one machine all ranks, since their devices may have direct links.
    several = world > each
    if first or not several:
        number, count = (rank // each, world // each) if several else (rank, world)
        measurements = measure_pairs(store, number, count, device)
        if several:
            names = {at: facts_by_rank[at * each].node if at * each in facts_by_rank else "?" for at in range(count)}
        else:
            names = {at: f"rank {at}" for at in range(count)}
        findings += diagnose_pairs(measurements, names, count)
    return findings


def check_net(store: Store | None = None, secret: str = "") -> list[Finding]:
    """The network only: of this machine, or with a store between the first ranks of all nodes."""
    if store is None:
        return check_own_network()
    rank, each = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if rank % each:
        return []
    number, count = rank // each, int(os.environ["WORLD_SIZE"]) // each
    master = Target(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), "store")
    device = pick_device("auto")

    def measure() -> list[PairMeasurement]:
        return measure_pairs(store, number, count, device) if device.type == "cuda" else []

    return NetCheck(store, secret, number, count, master, measure).run()


def compare_devices(device_checks: dict[str, DeviceCheck]) -> list[Finding]:
    """Devices of one kind must compute the same bits in about the same time."""
    findings = [
        Finding(
            "bad", name, "computes different bits each time for the same product", "exclude it, and have it replaced"
        )
        for name, check in device_checks.items()
        if not check.steady
    ]
    for kind in sorted({check.device for check in device_checks.values()}):
        same_kind = {name: check for name, check in device_checks.items() if check.device == kind and check.steady}
        digests = Counter(check.digest for check in same_kind.values())
        usual = digests.most_common(1)[0][0] if digests else ""
        median = statistics.median(check.seconds for check in same_kind.values()) if same_kind else 0.0
        for name, check in same_kind.items():
            if check.digest != usual:
                findings.append(
                    Finding(
                        "bad",
                        name,
                        f"computes different bits than its peers ({kind})",
                        "exclude it: its arithmetic is wrong, or its libraries differ",
                    )
                )
            elif check.seconds > SLOW_DEVICE_FACTOR * median:
                findings.append(
                    Finding(
                        "note",
                        name,
                        f"{check.seconds / median:.1f} times as slow as its peers ({kind})",
                        "check for heat, a power limit, or other processes",
                    )
                )
        if same_kind:
            findings.append(
                Finding("good", "devices", f"{len(same_kind)} of {kind}: a product in {1000 * median:.1f} ms")
            )
    return findings


def compare_versions(by_node: dict[str, dict[str, str]]) -> list[Finding]:
    findings = []
    for name in sorted({name for found in by_node.values() for name in found}):
        counts = Counter(found.get(name, "none") for found in by_node.values())
        usual = counts.most_common(1)[0][0]
        findings += [
            Finding("bad", f"{node}, {name}", f"{found.get(name, 'none')}, where others have {usual}",
                    "install the same on every node")
            for node, found in by_node.items()
            if found.get(name, "none") != usual
        ]  # fmt: skip
    return findings
