"""How CPUs, GPUs and network cards of a node are joined, from sysfs and ``nvidia-smi topo -m``, and what that means
for a job: where ranks should run, and which links are slow."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from zero2all.base.findings import Finding, finding_if
from zero2all.base.machine.cpus import SYSFS, NumaNode, pci_numa_node, rank_binding, read_numa_nodes, show_cpu_list
from zero2all.base.machine.devices import gpu_pci_addresses
from zero2all.base.processes import program_output, read_text
from zero2all.base.units import show_bytes

LINKS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the host bridge",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between CPU sockets",
}
"""nvidia-smi's names of PCIe paths, the nearest first."""
ACS_CAPABILITY = 0x000D
ACS_REDIRECTS = 0b1100  # of requests and of completions between devices
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines its header


@dataclass(frozen=True)
class Nic:
    """A card that speaks InfiniBand or RoCE."""

    name: str
    numa_node: int | None
    layer: str
    """InfiniBand or Ethernet."""
    state: str
    rate: str
    path: Path
    """Its place in sysfs, through bridges and switches."""


@dataclass(frozen=True)
class GpuPlace:
    index: int
    address: str
    numa_node: int | None
    path: Path


@dataclass(frozen=True)
class Topology:
    nodes: list[NumaNode]
    gpus: list[GpuPlace]
    nics: list[Nic]
    links: dict[tuple[str, str], str]
    """Links between GPUs and cards by name (GPU0, mlx5_0): NV and a number of NVLinks, or a PCIe path."""
    redirecting_bridges: list[str]
    """PCIe bridges above GPUs where ACS sends traffic between devices through the CPU."""

    def nearest_nics(self, gpu: GpuPlace) -> tuple[str, list[Nic]]:
        """The shortest path from a GPU to a network card, and the cards that it leads to."""
        paths = {nic.name: self.links.get((f"GPU{gpu.index}", nic.name), "SYS") for nic in self.nics}
        shortest = min(paths.values(), key=list(LINKS).index)
        return shortest, [nic for nic in self.nics if paths[nic.name] == shortest]

    def gpu_pairs(self) -> list[tuple[int, int, str]]:
        indices = [gpu.index for gpu in self.gpus]
        return [(a, b, self.links.get((f"GPU{a}", f"GPU{b}"), "SYS")) for a in indices for b in indices if a < b]


@dataclass(frozen=True)
class SmiTopology:
    """What nvidia-smi says; it numbers GPUs by their place on PCI, and knows nothing of CUDA_VISIBLE_DEVICES."""

    matrix: str
    addresses: list[str]
    """The addresses of all GPUs of the node, in the order of the matrix."""

    @classmethod
    def read(cls) -> SmiTopology | None:
        """Ask nvidia-smi on this machine; None without it."""
        smi = partial(program_output, "nvidia-smi", timeout=30, check=True)
        query = smi("--query-gpu=pci.bus_id", "--format=csv,noheader")
        return cls(smi("topo", "-m"), [pci_address(line) for line in query.splitlines()]) if query else None

    def links(self, addresses: Sequence[str]) -> dict[tuple[str, str], str]:
        """The links between GPUs, which are numbered as in ``addresses``."""
        names = {
            f"GPU{self.addresses.index(one)}": f"GPU{at}" for at, one in enumerate(addresses) if one in self.addresses
        }
        found = parse_topo_matrix(self.matrix)
        gpus = {name for pair in found for name in pair if name.startswith("GPU")} - set(names)
        return {
            (names.get(one, one), names.get(other, other)): link
            for (one, other), link in found.items()
            if one not in gpus and other not in gpus
        }


def pci_address(text: str) -> str:
    """
    >>> pci_address("00000000:B1:00.0")
    '0000:b1:00.0'
    """
    return text.strip().lower()[-12:]


def read_topology(addresses: Sequence[str], smi: SmiTopology | None, sysfs: Path = SYSFS) -> Topology:
    """``addresses`` are the GPUs' PCI addresses, in CUDA's order; sysfs knows no NVLink, nvidia-smi does."""
    gpus = [
        GpuPlace(index, address, pci_numa_node(address, sysfs), (sysfs / "bus/pci/devices" / address).resolve())
        for index, address in enumerate(addresses)
    ]
    nics = read_nics(sysfs)
    places = [(f"GPU{gpu.index}", gpu.path, gpu.numa_node) for gpu in gpus]
    places += [(nic.name, nic.path, nic.numa_node) for nic in nics]
    links = {
        (one, other): pci_link(path, other_path, same_node=node == other_node)
        for one, path, node in places
        for other, other_path, other_node in places
        if one != other
    }
    if smi is not None:
        links |= {pair: link for pair, link in smi.links(addresses).items() if pair in links}
    bridges = sorted({bridge.name for gpu in gpus for bridge in gpu.path.parents if redirects(bridge)})
    return Topology(read_numa_nodes(sysfs), gpus, nics, links, bridges)


def read_nics(sysfs: Path = SYSFS) -> list[Nic]:
    found = []
    for place in sorted((sysfs / "class/infiniband").glob("*")):
        device, port = (place / "device").resolve(), place / "ports/1"
        node = read_text(device / "numa_node").strip()
        found.append(
            Nic(
                name=place.name,
                numa_node=int(node) if node.isdigit() else None,
                layer=read_text(port / "link_layer").strip(),
                state=read_text(port / "state").strip().rpartition(": ")[2],
                rate=read_text(port / "rate").strip(),
                path=device,
            )
        )
    return found


def pci_link(one: Path, other: Path, *, same_node: bool) -> str:
    """The path between two PCI devices, by the bridges that their places in sysfs have in common."""
    shared = [a for a, b in zip(_bridges(one), _bridges(other), strict=False) if a == b]
    if not shared:  # of different host bridges
        return "NODE" if same_node else "SYS"
    if len(shared) == 1:
        return "PHB"
    # Bridges between each device and what they share: one switch has a port up, and one down to each device.
    apart = max(len(_bridges(one)), len(_bridges(other))) - len(shared)
    return "PIX" if apart <= 1 else "PXB"


def _bridges(path: Path) -> list[str]:
    """The bridges from the host bridge down, without the device itself."""
    parts = list(path.parts)
    first = next((at for at, part in enumerate(parts) if part.startswith("pci")), len(parts))
    return parts[first:-1]


def parse_topo_matrix(text: str) -> dict[tuple[str, str], str]:
    """What ``nvidia-smi topo -m`` prints: a row and a column for each GPU and card. NIC0 becomes its name (mlx5_0)."""
    lines = [_ESCAPES.sub("", line) for line in text.splitlines()]
    header = next((line for line in lines if line.split()[:1] == ["GPU0"]), "")
    columns = [word for word in header.split() if re.fullmatch(r"GPU\d+|NIC\d+|mlx\w+", word)]
    legend = (re.fullmatch(r"\s*(NIC\d+):\s*(\S+)\s*", line) for line in lines)
    names = {match[1]: match[2] for match in legend if match}
    links = {}
    for line in lines:
        row, *cells = line.split() or [""]
        if row not in columns or line == header:
            continue
        for column, cell in zip(columns, cells, strict=False):
            if cell != "X" and (cell in LINKS or re.fullmatch(r"NV\d+", cell)):
                links[names.get(row, row), names.get(column, column)] = cell
    return links


def redirects(bridge: Path) -> bool:
    """Whether ACS of a PCIe bridge is on. Reading so much of its configuration needs root: if not readable, False."""
    try:
        data = (bridge / "config").read_bytes()
    except OSError:
        return False
    offset, seen = 0x100, set()
    while len(data) >= offset + 8 and offset not in seen and offset:
        seen.add(offset)
        header = int.from_bytes(data[offset : offset + 4], "little")
        if header & 0xFFFF == ACS_CAPABILITY:
            return bool(int.from_bytes(data[offset + 6 : offset + 8], "little") & ACS_REDIRECTS)
        offset = header >> 20
    return False


PeerAccess = Callable[[int, int], bool]
FAR = ("NODE", "SYS")  # paths over which a network card reads GPU memory slowly, or not at all


@dataclass(frozen=True)
class Placement:
    """What a check is about."""

    topology: Topology
    allowed_cpus: frozenset[int]
    peer_access: PeerAccess


def check_topology() -> list[Finding]:
    """Findings about this machine."""
    addresses = gpu_pci_addresses()
    topology = read_topology(addresses, SmiTopology.read() if addresses else None)
    allowed = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    return topology_findings(Placement(topology, allowed, torch.cuda.can_device_access_peer))


def topology_findings(place: Placement) -> list[Finding]:
    return [*_check_nodes(place), *_check_gpus(place), *_check_links(place), *_check_nics(place)]


def _check_nodes(place: Placement) -> Iterator[Finding]:
    nodes = place.topology.nodes
    for node in nodes:
        far = ", ".join(
            f"{distance} to node {other.number}"
            for other, distance in zip(nodes, node.distances, strict=False)
            if other.number != node.number
        )
        text = f"CPUs {show_cpu_list(node.cpus)}, {show_bytes(node.memory)}" + (f", distance {far}" if far else "")
        yield Finding("good", f"NUMA node {node.number}", text)


def _check_gpus(place: Placement) -> Iterator[Finding]:
    topology = place.topology
    cpus = {node.number: set(node.cpus) for node in topology.nodes}
    for gpu in topology.gpus:
        what, where = f"GPU {gpu.index}", f"{gpu.address}, NUMA node {gpu.numa_node}"
        if len(cpus) > 1 and gpu.numa_node is None:
            yield Finding(
                "note",
                what,
                f"{gpu.address}: the firmware does not say at which NUMA node it is",
                "no rank can be bound near it: look for a NUMA or SR-IOV setting of the BIOS or hypervisor",
            )
        elif len(cpus) > 1 and gpu.numa_node in cpus and not cpus[gpu.numa_node] & place.allowed_cpus:
            allowed = show_cpu_list(place.allowed_cpus)
            yield Finding(
                "note",
                what,
                f"{where}, but this process may only use CPUs {allowed} of another",
                "ask for CPUs of both sockets: Slurm --exclusive or --cpus-per-gpu, Docker --cpuset-cpus",
            )
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
    yield Finding(
        "good",
        "links between GPUs",
        ", ".join(f"{link}: {sum(one == link for _, _, one in pairs)} pairs" for link in kinds),
    )
    blocked = [(a, b) for a, b, _ in pairs if not place.peer_access(a, b)]
    if blocked:
        yield Finding(
            "note",
            "peer access",
            f"missing for {_pairs_text(blocked)}: they send through host memory",
            "RTX cards have none; on others check ACS, the IOMMU and the container's --ipc=host",
        )
    crossing = [(a, b) for a, b, link in pairs if link == "SYS"]
    if crossing:
        yield Finding(
            "note",
            "links between GPUs",
            f"{_pairs_text(crossing)} cross {LINKS['SYS']}",
            "keep tp inside one socket: order the GPUs with CUDA_VISIBLE_DEVICES",
        )
    bridges = place.topology.redirecting_bridges
    if bridges:
        yield Finding(
            "note",
            "ACS",
            f"sends traffic between PCIe devices through the CPU at {', '.join(bridges)}",
            "switch it off in the BIOS, or with setpci for these bridges (NCCL, troubleshooting, PCI ACS)",
        )


def _pairs_text(pairs: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"{a}-{b}" for a, b in pairs[:4])
    return f"{len(pairs)} pairs of GPUs ({shown}{', ...' if len(pairs) > 4 else ''})"


def _check_nics(place: Placement) -> Iterator[Finding]:
    topology = place.topology
    for nic in topology.nics:
        text = f"{nic.layer} {nic.rate}, NUMA node {nic.numa_node}, {nic.state}"
        yield finding_if(
            wrong=nic.state != "ACTIVE",
            level="note",
            what=f"network card {nic.name}",
            why=text,
            remedy="check its cable and the subnet manager, or leave it out with NCCL_IB_HCA",
        )
    for gpu in topology.gpus if topology.nics else ():
        link, _ = topology.nearest_nics(gpu)
        if link in FAR:
            yield Finding(
                "note",
                f"GPU {gpu.index}",
                f"reaches every network card only through {LINKS[link]}",
                "traffic to other nodes is slower than from GPUs with a card beside them",
            )


def check_binding() -> Finding | None:
    """Whether this rank runs on the CPUs that the launcher gave it; None without a binding."""
    state = rank_binding()
    if state.wanted is None:
        return None
    text = state.problem or f"CPUs {state.cpus} of NUMA node {state.wanted.node}, memory of nodes {state.memory_nodes}"
    return finding_if(
        wrong=bool(state.problem),
        level="note",
        what="CPU binding",
        why=text,
        remedy="a cgroup or Slurm restricts it: give the job all CPUs, or --numa-binding off",
    )


def binding_findings(by_rank: Iterable[tuple[str, Finding | None]]) -> list[Finding]:
    """The findings of all ranks, each with the name of its rank."""
    return [Finding(one.level, f"{name}, {one.what}", one.why, one.remedy) for name, one in by_rank if one is not None]
