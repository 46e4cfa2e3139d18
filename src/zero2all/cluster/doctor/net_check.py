"""``z2a doctor --net``: name resolution, interface, MTU, ports, both directions and bandwidth between all nodes.

Every node listens where its ranks would, and tries the others in rounds of pairs. Results go through the store, which
every node reaches.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch

from zero2all.base.environment import collective_backend
from zero2all.base.findings import Finding, finding_if
from zero2all.base.network.addresses import (
    interface_addresses,
    interface_for_address,
    interface_mtu,
    source_address_towards,
)
from zero2all.base.records import parse_record
from zero2all.base.torch_private import PrefixStore, Store, gloo_group, nccl_group
from zero2all.base.units import show_bytes
from zero2all.cluster.doctor.pairs import (
    MAX_ROUNDS,
    PAIR_TIMEOUT,
    PairMeasurement,
    bad_pairs,
    min_rounds,
    round_robin_rounds,
    undecided_nodes,
)
from zero2all.cluster.doctor.reachability import ProbeListener, Target, Unreachable, ephemeral_ports, probe, unreachable
from zero2all.cluster.doctor.topology import Nic, read_nics

MAX_PARTNERS = 31  # nodes that each node tries
SEND_SECONDS = 0.3  # for the bandwidth of one direction
MAX_SHOWN = 12  # directions whose bandwidth is printed one by one
SLOW_SHARE = 0.25  # of the median bandwidth
DEVICES = Path("/dev/infiniband")


@dataclass(frozen=True)
class NodeNetwork:
    """What a node tells the others."""

    name: str
    data: Target
    interface: str
    mtu: int | None
    store_port: int | None = None
    """The port on which the store of the ranks would listen; only of the first node."""
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True)
class Direction:
    """What one node found about its way to another."""

    source: int
    node: int
    unreachable: Unreachable | None = None
    bytes_per_second: float | None = None


@dataclass(frozen=True)
class NetCheck:
    """The part of one node; ``number`` of ``count``."""

    store: Store
    secret: str
    number: int
    count: int
    master: Target
    """The address of the ranks' store: on the first node its own one, elsewhere the one that leads there."""
    measure_devices: Callable[[], list[PairMeasurement]]
    """Exchanges between GPUs by NCCL, after the exchanges over TCP."""

    def run(self) -> list[Finding]:
        address, interface = data_address(self.master.address)
        with ExitStack() as stack:
            data = stack.enter_context(ProbeListener(address, 0, self._name(self.number, "data"), self.secret))
            if self.number == 0:
                stack.enter_context(ProbeListener(address, self.master.port, self._name(0, "store"), self.secret))
            target = Target(address, data.address.port, "data", ephemeral_ports())
            own = NodeNetwork(
                socket.gethostname(),
                target,
                interface,
                interface_mtu(interface),
                self.master.port if self.number == 0 else None,
                list(local_findings(address, interface)),
            )
            exchanged = exchange_through_store(self.store, "net/nodes", self.number, self.count, asdict(own))
            nodes = {number: parse_record(NodeNetwork, value, "node") for number, value in exchanged.items()}
            directions = self._try_all(nodes)
        measured = self.measure_devices()
        return [
            *missing_nodes(nodes, self.count),
            *(finding for node in nodes.values() for finding in node.findings),
            *direction_findings(directions, {number: node.name for number, node in nodes.items()}),
            *mtu_findings(list(nodes.values())),
            *nccl_findings(measured, directions, {number: node.name for number, node in nodes.items()}),
        ]

    def _name(self, number: int, purpose: str) -> str:
        return f"doctor/{number}/{purpose}"

    def _try_all(self, nodes: Mapping[int, NodeNetwork]) -> list[Direction]:
        found = []
        for turn, pairs in enumerate(round_robin_rounds(self.count, MAX_PARTNERS)):
            mine = next((pair for pair in pairs if self.number in pair), None)
            other = None if mine is None else sum(mine) - self.number
            own = [] if other is None or other not in nodes else self._try_node(other, nodes[other])
            results = exchange_through_store(
                self.store, f"net/{turn}", self.number, self.count, [asdict(direction) for direction in own]
            )
            found += [parse_record(Direction, one, "node") for several in results.values() for one in several]
        return found

    def _try_node(self, other: int, node: NodeNetwork) -> list[Direction]:
        result = probe(node.data, self._name(other, "data"), self.secret, send_for=SEND_SECONDS)
        found = [self._direction(other, node, node.data, result.problem, result.bytes_per_second)]
        if other == 0:
            master = replace(self.master, ports=str(node.store_port or ""))
            store = probe(master, self._name(0, "store"), self.secret)
            found += [self._direction(0, node, master, store.problem)] if store.problem is not None else []
        return found

    def _direction(
        self, other: int, node: NodeNetwork, target: Target, problem: str | None, rate: float | None = None
    ) -> Direction:
        if problem is None:
            return Direction(self.number, other, bytes_per_second=rate)
        mapped = target.purpose == "store" and target.address != node.data.address
        return Direction(self.number, other, unreachable(node.name, target, problem, is_mapped=mapped, own_address="?"))


def data_address(master: str) -> tuple[str, str]:
    """The address and interface that gloo uses here: what the launcher or the user has set, else the way to rank 0."""
    wanted, interfaces = os.environ.get("GLOO_SOCKET_IFNAME", ""), interface_addresses()
    if wanted in interfaces:
        return interfaces[wanted], wanted
    address = source_address_towards(master)
    return address, interface_for_address(address) or ""


def check_own_network() -> list[Finding]:
    """Findings about one machine, without others."""
    interfaces = interface_addresses()
    return [
        *(
            Finding("good", f"interface {name}", f"{address}, MTU {interface_mtu(name)}")
            for name, address in interfaces.items()
        ),
        _check_host_name(),
        *fabric_settings(read_nics(), has_devices=DEVICES.exists()),
    ]


def local_findings(address: str, interface: str) -> Iterator[Finding]:
    name = socket.gethostname()
    yield Finding(
        "good",
        name,
        f"{interface or '?'} {address}, MTU {interface_mtu(interface)}; "
        f"GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME=={interface}",
    )
    yield _check_host_name()
    yield from fabric_settings(read_nics(), has_devices=DEVICES.exists())


def _check_host_name() -> Finding:
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
        wrong, text = ip_address(address).is_loopback, f"resolves to {address}"
    except OSError as error:
        wrong, text = True, f"does not resolve ({error.strerror})"
    return finding_if(
        wrong=wrong,
        level="note",
        what=f"host name {name}",
        why=text,
        remedy="z2a launch does not use it, but programs without GLOO_SOCKET_IFNAME tell it to others: fix /etc/hosts",
    )


def fabric_settings(nics: list[Nic], *, has_devices: bool) -> Iterator[Finding]:
    """What NCCL should use, where there are InfiniBand or RoCE cards."""
    what, active = f"{socket.gethostname()}, InfiniBand", [nic for nic in nics if nic.state == "ACTIVE"]
    if not nics:
        return
    if not has_devices:
        yield Finding(
            "note",
            what,
            "the cards are there, but not /dev/infiniband: a container without them",
            "docker run --device /dev/infiniband --ulimit memlock=-1, or NCCL_IB_DISABLE=1",
        )
    elif not active:
        yield Finding("note", what, "no card is active: NCCL may wait for them", "set NCCL_IB_DISABLE=1")
    else:
        roce = " NCCL_IB_GID_INDEX=3" if any(nic.layer == "Ethernet" for nic in active) else ""
        yield Finding("good", what, f"NCCL_IB_HCA={','.join(nic.name for nic in active)}{roce}")


def missing_nodes(nodes: Mapping[int, NodeNetwork], count: int) -> list[Finding]:
    return [
        Finding("bad", f"node {number}", "did not report: it or its connection is lost", "check that node")
        for number in range(count)
        if number not in nodes
    ]


def direction_findings(directions: list[Direction], names: Mapping[int, str]) -> list[Finding]:
    broken = [direction.unreachable for direction in directions if direction.unreachable is not None]
    findings = [
        Finding("bad", f"{one.source} to {one.node}", f"TCP {one.target}: {one.problem}", one.fix) for one in broken
    ]
    rates = {(one.source, one.node): one.bytes_per_second for one in directions if one.bytes_per_second is not None}
    if not rates:
        return findings
    median = statistics.median(rates.values())
    slow = {pair for pair, rate in rates.items() if rate < SLOW_SHARE * median}
    shown = rates if len(rates) <= MAX_SHOWN else {pair: rates[pair] for pair in slow}
    fix = f"others reach {show_bytes(median)}/s: check cable, switch port and other traffic"
    for (source, node), rate in sorted(shown.items()):
        what = f"{names[source]} to {names[node]}"
        findings.append(
            finding_if(wrong=(source, node) in slow, level="note", what=what, why=f"{show_bytes(rate)}/s", remedy=fix)
        )
    if len(rates) > MAX_SHOWN:
        findings.append(Finding("good", "bandwidth", f"{show_bytes(median)}/s (median of {len(rates)} directions)"))
    return findings


def mtu_findings(nodes: Sequence[NodeNetwork]) -> list[Finding]:
    """Nodes whose interface takes larger packets than others: without ICMP these packets vanish."""
    by_mtu = {node.name: node.mtu for node in nodes if node.mtu is not None}
    smallest = min(by_mtu.values(), default=0)
    interfaces = {node.name: node.interface for node in nodes}
    return [
        Finding(
            "note",
            f"MTU of {name}",
            f"{mtu}, where others have {smallest}",
            f"ip link set dev {interfaces[name]} mtu {smallest}",
        )
        for name, mtu in by_mtu.items()
        if mtu != smallest
    ]


def nccl_findings(
    measured: list[PairMeasurement], directions: list[Direction], names: Mapping[int, str]
) -> list[Finding]:
    """Pairs between which TCP works and NCCL does not."""
    broken = {frozenset((one.source, one.node)) for one in directions if one.unreachable is not None}
    fix = "try NCCL_IB_DISABLE=1, then NCCL_P2P_DISABLE=1; if it still hangs: z2a launch --backend gloo (slower)"
    return [
        Finding("bad", f"NCCL between {names[one]} and {names[other]}", f"{how}, although TCP works", fix)
        for (one, other), how in bad_pairs(measured).items()
        if {one, other} not in broken
    ]


CPU_PROBE_BYTES, GPU_PROBE_BYTES = 1 << 20, 1 << 26
REPEATS = 5  # of which the fastest counts: a busy machine is not a slow network
TOTAL_TIMEOUT = 10 * PAIR_TIMEOUT  # for all of them: gloo tries five times to reach a partner


def measure_pairs(store: Store, number: int, count: int, device: torch.device) -> list[PairMeasurement]:
    """Two rounds, and more while some node is undecided. Every node gets all results."""
    measurements: list[PairMeasurement] = []
    for turn, pairs in enumerate(round_robin_rounds(count, MAX_ROUNDS)):
        if turn >= min_rounds(count) and not undecided_nodes(measurements, count):
            break
        mine = next((pair for pair in pairs if number in pair), None)
        own = [] if mine is None else [measure_pair(PrefixStore(f"pair/{turn}/{mine}", store), number, mine, device)]
        results = exchange_through_store(
            store, f"talks/{turn}", number, count, [asdict(measurement) for measurement in own]
        )
        measurements += [PairMeasurement(**measurement) for found in results.values() for measurement in found]
    return measurements


def exchange_through_store(store: Store, name: str, number: int, count: int, value: Any) -> dict[int, Any]:
    """What each node has to say, by number; one that says nothing in time is left out."""
    store.set(f"{name}/{number}", json.dumps(value))
    deadline, found = time.monotonic() + TOTAL_TIMEOUT, {}
    for other in range(count):
        left = max(0.1, deadline - time.monotonic())
        try:
            store.wait([f"{name}/{other}"], timedelta(seconds=left))
        except RuntimeError:
            continue
        found[other] = json.loads(store.get(f"{name}/{other}"))
    return found


def measure_pair(store: Store, number: int, pair: tuple[int, int], device: torch.device) -> PairMeasurement:
    other = pair[0] if number == pair[1] else pair[1]
    try:
        rank = pair.index(number)
        group = _group(store, rank, device)
        _gather(group, torch.zeros(1, device=device))  # connects
        clocks = _gather(group, torch.tensor([time.time()], dtype=torch.float64, device=device))
        size = GPU_PROBE_BYTES if device.type == "cuda" else CPU_PROBE_BYTES
        data = torch.full((size // 4,), float(rank), device=device)
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            parts = _gather(group, data)
            times.append(time.perf_counter() - begin)
        if any(not bool((part == place).all()) for place, part in enumerate(parts)):
            return PairMeasurement(number, other, None)
        return PairMeasurement(number, other, min(times), float(clocks[1 - rank] - clocks[rank]))
    except RuntimeError:
        return PairMeasurement(number, other, None)


def _group(store: Store, rank: int, device: torch.device) -> Any:
    new_group = nccl_group if collective_backend(device.type).endswith("nccl") else gloo_group
    return new_group(store, rank, 2, timedelta(seconds=PAIR_TIMEOUT))


def _gather(group: Any, mine: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(mine) for _ in range(2)]
    group.allgather([parts], [mine]).wait()
    if mine.is_cuda:
        torch.cuda.synchronize()
    return parts
