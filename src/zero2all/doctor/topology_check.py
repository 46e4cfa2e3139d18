"""What the topology of a node means for a job: where ranks should run, and which links are slow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from zero2all.doctor.topology import LINKS, GpuPlace, SmiTopology, Topology, read_topology
from zero2all.findings import Finding, finding_if
from zero2all.hardware import gpu_pci_addresses
from zero2all.numa import rank_binding, show_cpu_list
from zero2all.units import show_bytes

PeerAccess = Callable[[int, int], bool]
FAR = ("NODE", "SYS")  # paths over which a network card reads GPU memory slowly, or not at all


@dataclass(frozen=True)
class Placement:
    """What a check is about."""

    topology: Topology
    allowed_cpus: frozenset[int]
    peer_access: PeerAccess


def check_topology() -> list[Finding]:
    """Of this machine."""
    addresses = gpu_pci_addresses()
    topology = read_topology(addresses, SmiTopology.read() if addresses else None)
    allowed = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    return topology_findings(Placement(topology, allowed, torch.cuda.can_device_access_peer))


def topology_findings(place: Placement) -> list[Finding]:
    return [*_check_nodes(place), *_check_gpus(place), *_check_links(place), *_check_nics(place)]


def _check_nodes(place: Placement) -> Iterator[Finding]:
    nodes = place.topology.nodes
    for node in nodes:
        far = ", ".join(f"{distance} to node {other.number}" for other, distance in
                        zip(nodes, node.distances, strict=False) if other.number != node.number)  # fmt: skip
        text = f"CPUs {show_cpu_list(node.cpus)}, {show_bytes(node.memory)}" + (f", distance {far}" if far else "")
        yield Finding("good", f"NUMA node {node.number}", text)


def _check_gpus(place: Placement) -> Iterator[Finding]:
    topology = place.topology
    cpus = {node.number: set(node.cpus) for node in topology.nodes}
    for gpu in topology.gpus:
        what, where = f"GPU {gpu.index}", f"{gpu.address}, NUMA node {gpu.numa_node}"
        if len(cpus) > 1 and gpu.numa_node is None:
            yield Finding("note", what, f"{gpu.address}: the firmware does not say at which NUMA node it is",
                          "no rank can be bound near it: look for a NUMA or SR-IOV setting of the BIOS or hypervisor",
                          )  # fmt: skip
        elif len(cpus) > 1 and gpu.numa_node in cpus and not cpus[gpu.numa_node] & place.allowed_cpus:
            allowed = show_cpu_list(place.allowed_cpus)
            yield Finding("note", what, f"{where}, but this process may only use CPUs {allowed} of another",
                          "ask for CPUs of both sockets: Slurm --exclusive or --cpus-per-gpu, Docker --cpuset-cpus",
                          )  # fmt: skip
        else:
            nearest = _nearest_text(topology, gpu)
            yield Finding("good", what, (where if gpu.numa_node is not None else gpu.address) + nearest)


def _nearest_text(topology: Topology, gpu: GpuPlace) -> str:
    if not topology.nics:
        return ""
    link, nics = topology.nearest_nics(gpu)
    return f", nearest network card {', '.join(nic.name for nic in nics)} through {LINKS[link]}"


def _check_links(place: Placement) -> Iterator[Finding]:
    pairs = place.topology.gpu_pairs()
    if not pairs:
        return
    kinds = sorted({link for _, _, link in pairs})
    yield Finding("good", "links between GPUs", ", ".join(
        f"{link}: {sum(one == link for _, _, one in pairs)} pairs" for link in kinds))  # fmt: skip
    blocked = [(a, b) for a, b, _ in pairs if not place.peer_access(a, b)]
    if blocked:
        yield Finding("note", "peer access", f"missing for {_pairs_text(blocked)}: they send through host memory",
                      "RTX cards have none; on others check ACS, the IOMMU and the container's --ipc=host")  # fmt: skip
    crossing = [(a, b) for a, b, link in pairs if link == "SYS"]
    if crossing:
        yield Finding("note", "links between GPUs", f"{_pairs_text(crossing)} cross {LINKS['SYS']}",
                      "keep tp inside one socket: order the GPUs with CUDA_VISIBLE_DEVICES")  # fmt: skip
    bridges = place.topology.redirecting_bridges
    if bridges:
        yield Finding("note", "ACS", f"sends traffic between PCIe devices through the CPU at {', '.join(bridges)}",
                      "switch it off in the BIOS, or with setpci for these bridges (NCCL, troubleshooting, PCI ACS)",
                      )  # fmt: skip


def _pairs_text(pairs: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"{a}-{b}" for a, b in pairs[:4])
    return f"{len(pairs)} pairs of GPUs ({shown}{', ...' if len(pairs) > 4 else ''})"


def _check_nics(place: Placement) -> Iterator[Finding]:
    topology = place.topology
    for nic in topology.nics:
        text = f"{nic.layer} {nic.rate}, NUMA node {nic.numa_node}, {nic.state}"
        yield finding_if(nic.state != "ACTIVE", "note", f"network card {nic.name}", text,
                         "check its cable and the subnet manager, or leave it out with NCCL_IB_HCA")  # fmt: skip
    for gpu in topology.gpus if topology.nics else ():
        link, _ = topology.nearest_nics(gpu)
        if link in FAR:
            yield Finding("note", f"GPU {gpu.index}", f"reaches every network card only through {LINKS[link]}",
                          "traffic to other nodes is slower than from GPUs with a card beside them")  # fmt: skip


def check_binding() -> Finding | None:
    """Whether this rank runs on the CPUs that the launcher gave it; None without a binding."""
    state = rank_binding()
    if state.wanted is None:
        return None
    text = state.problem or f"CPUs {state.cpus} of NUMA node {state.wanted.node}, memory of nodes {state.memory_nodes}"
    return finding_if(bool(state.problem), "note", "CPU binding", text,
                      "a cgroup or Slurm restricts it: give the job all CPUs, or --numa-binding off")  # fmt: skip


def binding_findings(by_rank: Iterable[tuple[str, Finding | None]]) -> list[Finding]:
    """Of all ranks, by name."""
    return [Finding(one.level, f"{name}, {one.what}", one.why, one.remedy) for name, one in by_rank if one is not None]
