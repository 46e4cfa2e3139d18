"""``z2a doctor``: is this machine, or are these nodes, fit for a job? Every finding comes with its fix."""

from __future__ import annotations

import os
import socket
import statistics
from collections import Counter
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from zero2all.hardware import pick_device
from zero2all.resilience.beat import STORE
from zero2all.resilience.findings import Finding
from zero2all.resilience.link import LinkStore
from zero2all.resilience.machine import Compute, check_machine, try_device, versions
from zero2all.resilience.pairs import exchange, judge_talks, talk_in_pairs

SLOWER = 1.5  # times as long as its peers


def examine(directory: Path) -> list[Finding]:
    """On one machine all of its devices; under ``z2a launch`` one device a rank, and the ways between the nodes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return _examine_together(directory)
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", number) for number in range(count)] or [torch.device("cpu")]
    computes = {f"device {device}": try_device(device) for device in devices}
    return [*check_machine(directory), *compare_devices(computes)]


def _examine_together(directory: Path) -> list[Finding]:
    """Every rank takes part, and all learn the same."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    each = int(os.environ["LOCAL_WORLD_SIZE"])
    # The agents' store: every node reaches it, while the way to the first node may be the one that is broken.
    store = LinkStore.of_this_rank(os.environ[STORE], os.environ["TORCHELASTIC_RUN_ID"], timedelta(seconds=60))
    device = pick_device("auto")
    node = f"{socket.gethostname()} (node {rank // each})"
    first = rank % each == 0
    facts: dict[str, Any] = {"node": node, "versions": versions(), "compute": asdict(try_device(device))}
    facts["findings"] = [asdict(finding) for finding in check_machine(directory)] if first else []
    told = exchange(store, "facts", rank, world, facts)
    findings = [Finding("bad", f"rank {number}", "said nothing: its node or its way to the first node is lost",
                        "look at that node") for number in range(world) if number not in told]  # fmt: skip
    for fact in told.values():
        found = [Finding(**finding) for finding in fact["findings"]]
        findings += [
            Finding(one.level, f"{fact['node']}, {one.what}", one.text, one.fix) for one in found if one.level != "good"
        ]
    computes = {f"rank {number} on {fact['node']}": Compute(**fact["compute"]) for number, fact in told.items()}
    findings += compare_devices(computes)
    findings += compare_versions({fact["node"]: fact["versions"] for fact in told.values()})
    # Between nodes the first rank of each; on one machine all ranks, since their devices may have links of their own.
    several = world > each
    if first or not several:
        number, count = (rank // each, world // each) if several else (rank, world)
        talks = talk_in_pairs(store, number, count, device)
        names = {at: told.get(at * each if several else at, {"node": "?"})["node"] for at in range(count)}
        if not several:
            names = {at: f"rank {at}" for at in range(count)}
        findings += judge_talks(talks, names, count)
    return findings


def compare_devices(computes: dict[str, Compute]) -> list[Finding]:
    """Devices of one kind must give the same bits in about the same time."""
    findings = [
        Finding("bad", name, "gives other bits each time for the same product", "leave it out, and have it replaced")
        for name, compute in computes.items()
        if not compute.steady
    ]
    for kind in sorted({compute.device for compute in computes.values()}):
        alike = {name: compute for name, compute in computes.items() if compute.device == kind and compute.steady}
        digests = Counter(compute.digest for compute in alike.values())
        usual = digests.most_common(1)[0][0] if digests else ""
        median = statistics.median(compute.seconds for compute in alike.values()) if alike else 0.0
        for name, compute in alike.items():
            if compute.digest != usual:
                findings.append(
                    Finding(
                        "bad",
                        name,
                        f"computes other bits than its peers ({kind})",
                        "leave it out: its arithmetic is wrong, or its libraries are others",
                    )
                )
            elif compute.seconds > SLOWER * median:
                findings.append(
                    Finding(
                        "note",
                        name,
                        f"{compute.seconds / median:.1f} times as slow as its peers ({kind})",
                        "look for heat, a power limit, or something else that runs there",
                    )
                )
        if alike:
            findings.append(Finding("good", "devices", f"{len(alike)} of {kind}: a product in {1000 * median:.1f} ms"))
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
