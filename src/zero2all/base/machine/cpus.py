"""CPUs of this machine: NUMA nodes and binding the ranks of a job to them; sharing them with other programs.

No torch: a rank binds itself before it imports anything that starts threads, and threads inherit the binding. Memory
needs no policy of its own: Linux gives a page to the node of the CPU that first writes it, and takes another node if
that one is full, where a strict policy would end the process.

torch's libgomp lets a thread spin 300,000 times at a barrier before it sleeps: 4.3 ms on the machine of our benchmarks.
On a core of its own that costs nothing. Beside other work the thread that it waits for may not run at all, and is
kept from its core by the one that spins. Longer than most gaps between two operations is enough.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

SYSFS = Path("/sys")
BINDING_VARIABLE = "Z2A_CPU_BINDINGS"  # of every rank of this node, set by the launcher
BindingMode = Literal["auto", "node", "core-complex", "off"]


@dataclass(frozen=True)
class NumaNode:
    number: int
    cpus: tuple[int, ...]
    memory: int
    """Bytes."""
    distances: tuple[int, ...]
    """Distances to all nodes, itself included, in the order of their numbers; 10 is local."""


@dataclass(frozen=True)
class CpuBinding:
    """Where a rank is to run."""

    node: int
    cpus: str
    """A list as Linux writes it, such as 0-3,8."""


@dataclass(frozen=True)
class BindingState:
    """Where a rank does run, as the kernel says."""

    wanted: CpuBinding | None
    cpus: str
    memory_nodes: str
    problem: str = ""
    """Empty if the rank runs where it should."""


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """
    >>> parse_cpu_list("0-2,8")
    (0, 1, 2, 8)
    """
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def show_cpu_list(cpus: Iterable[int]) -> str:
    """
    >>> show_cpu_list([8, 0, 1, 2])
    '0-2,8'
    """
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def read_numa_nodes(sysfs: Path = SYSFS) -> list[NumaNode]:
    """NUMA nodes that have CPUs; none where the kernel does not report them, as on macOS."""
    found = []
    for place in (sysfs / "devices/system/node").glob("node[0-9]*"):
        try:
            cpus = parse_cpu_list((place / "cpulist").read_text())
            distances = tuple(int(word) for word in (place / "distance").read_text().split())
            total = next(line for line in (place / "meminfo").read_text().splitlines() if "MemTotal:" in line)
            node = NumaNode(int(place.name.removeprefix("node")), cpus, int(total.split()[-2]) * 1024, distances)
        except (OSError, ValueError, StopIteration, IndexError):
            continue
        found += [node] if cpus else []
    return sorted(found, key=lambda node: node.number)


def pci_numa_node(address: str, sysfs: Path = SYSFS) -> int | None:
    """The NUMA node of a PCI device such as 0000:17:00.0; None if the firmware does not say."""
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def plan_bindings(
    mode: BindingMode, ranks: int, gpu_nodes: Sequence[int | None], allowed: Iterable[int], sysfs: Path = SYSFS
) -> list[CpuBinding | None]:
    """A binding for each rank of this node: to the NUMA node of its GPU, or, without GPUs, evenly over the nodes.

    ``auto`` binds where there are several NUMA nodes, but not ranks without GPUs that cannot be spread evenly: they
    would leave CPUs idle. Only ``allowed`` CPUs are used; a rank for which none is left stays unbound.
    """
    usable = set(allowed)
    nodes = {node.number: sorted(usable.intersection(node.cpus)) for node in read_numa_nodes(sysfs)}
    nodes = {number: cpus for number, cpus in nodes.items() if cpus}
    unbound: list[CpuBinding | None] = [None] * ranks
    even = ranks % max(1, len(nodes)) == 0
    if mode == "off" or not nodes or (mode == "auto" and (len(nodes) == 1 or not (gpu_nodes or even))):
        return unbound
    numbers = list(nodes)
    wanted = [
        (gpu_nodes[rank] if rank < len(gpu_nodes) else None) if gpu_nodes else numbers[rank * len(numbers) // ranks]
        for rank in range(ranks)
    ]
    seen: Counter[int] = Counter()
    bindings: list[CpuBinding | None] = []
    for node in wanted:
        if node is None or node not in nodes:
            bindings.append(None)
            continue
        cpus = nodes[node]
        if mode == "core-complex":
            complexes = core_complexes(cpus, sysfs)
            cpus = complexes[seen[node] % len(complexes)]
        seen[node] += 1
        bindings.append(CpuBinding(node, show_cpu_list(cpus)))
    return bindings


def core_complexes(cpus: Sequence[int], sysfs: Path = SYSFS) -> list[list[int]]:
    """CPUs that share an L3 cache, in order; all together if the kernel does not say."""
    groups: dict[str, list[int]] = {}
    for cpu in cpus:
        shared = sysfs / f"devices/system/cpu/cpu{cpu}/cache/index3/shared_cpu_list"
        groups.setdefault(shared.read_text().strip() if shared.exists() else "", []).append(cpu)
    return list(groups.values())


def threads_per_rank(bindings: Sequence[CpuBinding | None], cores: int) -> int:
    """The threads with which the ranks that share CPUs use each of them once."""
    sharing = Counter(binding.cpus if binding else None for binding in bindings)
    each = [len(parse_cpu_list(cpus)) // count for cpus, count in sharing.items() if cpus is not None]
    return max(1, min([cores // max(1, len(bindings)), *each]))


def encode_bindings(bindings: Sequence[CpuBinding | None]) -> dict[str, str]:
    """Variables for the environment of the ranks."""
    if not any(bindings):
        return {}
    return {BINDING_VARIABLE: json.dumps([binding and asdict(binding) for binding in bindings])}


def wanted_binding(environment: Mapping[str, str]) -> CpuBinding | None:
    """The binding of the rank with this environment."""
    if BINDING_VARIABLE not in environment:
        return None
    value = json.loads(environment[BINDING_VARIABLE])[int(environment.get("LOCAL_RANK", "0"))]
    return None if value is None else CpuBinding(int(value["node"]), str(value["cpus"]))


def bind_rank(environment: Mapping[str, str] = os.environ) -> BindingState | None:
    """Bind this process as the launcher planned, and verify it; None if nothing was planned."""
    binding = wanted_binding(environment)
    if binding is None:
        return None
    try:
        os.sched_setaffinity(0, parse_cpu_list(binding.cpus))
    except OSError as error:  # a cgroup that has become smaller since the launcher looked
        return binding_state(binding, problem=f"binding to CPUs {binding.cpus} failed: {error.strerror}")
    return binding_state(binding)


def rank_binding() -> BindingState:
    """Where this rank should run, and where it does."""
    return binding_state(wanted_binding(os.environ))


def binding_state(
    wanted: CpuBinding | None, problem: str = "", status: Path = Path("/proc/self/status")
) -> BindingState:
    """The state that the kernel reports for this process, not the one that was asked for."""
    fields = _status_fields(status)
    cpus, memory = fields.get("Cpus_allowed_list", ""), fields.get("Mems_allowed_list", "")
    if wanted is not None and not problem:
        if set(parse_cpu_list(cpus)) != set(parse_cpu_list(wanted.cpus)):
            problem = f"runs on CPUs {cpus}, not on {wanted.cpus} of NUMA node {wanted.node}"
        elif memory and wanted.node not in parse_cpu_list(memory):
            problem = f"may use memory of NUMA nodes {memory} only, and runs on CPUs of node {wanted.node}"
    return BindingState(wanted, cpus, memory, problem)


def _status_fields(status: Path) -> dict[str, str]:
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


NOTICEABLE_SHARE = 0.2  # of the cores; less is the noise of a system


class _CpuTimes(NamedTuple):
    """Seconds so far, over the cores that this process may use."""

    total: float
    busy: float
    own: float


class OtherCpuUse:
    """
    >>> others = OtherCpuUse()
    >>> others.share()  # of the cores that this process may use, since the last call
    0.03
    """

    def __init__(self) -> None:
        self._last = _read_cpu_times()

    def share(self) -> float | None:
        """None if the system does not report it. The ranks that run beside this one count as this program."""
        before, self._last = self._last, _read_cpu_times()
        if before is None or self._last is None or self._last.total <= before.total:
            return None
        total, busy, own = (now - then for now, then in zip(self._last, before, strict=True))
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return min(1.0, max(0.0, (busy - ranks * own) / total))


def busy_note(share: float | None) -> str:
    """A note for a log line; empty if others used next to nothing, or it is unknown."""
    return "" if share is None or share < NOTICEABLE_SHARE else f"other programs used {100 * share:.0f}% of the CPU"


def _read_cpu_times(path: Path = Path("/proc/stat")) -> _CpuTimes | None:
    try:
        cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = os.sysconf("SC_CLK_TCK")
        rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        # user, nice, system, idle, iowait, irq, softirq, steal; what follows is in user already.
        counts = [[int(field) for field in row[1:9]] for row in rows if row and row[0] in cores]
    except (OSError, ValueError, AttributeError):
        return None
    total, idle = sum(map(sum, counts)), sum(count[3] + count[4] for count in counts)
    return _CpuTimes(total / ticks, (total - idle) / ticks, time.process_time())


SPIN_COUNT = "3000"  # 43 us there; python -m benchmarks cpu_threads compares others
USER_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def spin_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to an environment, unless it already sets how threads wait."""
    return {} if any(name in environment for name in USER_VARIABLES) else {"GOMP_SPINCOUNT": SPIN_COUNT}


def limit_openmp_spinning() -> None:
    """Shorten the spinning of this process and its children.

    Call it before torch is imported, which is when libgomp reads the variable.
    """
    os.environ.update(spin_settings(os.environ))
