"""``z2a doctor``: checks of one node or of all nodes of a job. Every finding comes with a fix."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from zero2all import __version__
from zero2all.base.findings import Finding, finding_if
from zero2all.base.machine.devices import MPS, device_name, free_memory, pick_device
from zero2all.base.records import parse_record
from zero2all.base.torch_private import Store
from zero2all.base.units import show_bytes
from zero2all.cluster.doctor.net_check import NetCheck, check_own_network, exchange_through_store, measure_pairs
from zero2all.cluster.doctor.pairs import DeviceCheck, PairMeasurement, diagnose_pairs
from zero2all.cluster.doctor.reachability import Target
from zero2all.cluster.doctor.topology import binding_findings, check_binding, check_topology

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
    """Check all devices of one machine; with a store one device per rank, and the network between the nodes."""
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
    findings = [
        Finding("bad", f"rank {number}", "did not report: its node or its connection is lost", "check that node")
        for number in range(world)
        if number not in facts_by_rank
    ]
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
                why = f"computes different bits than its peers ({kind})"
                fix = "exclude it: its arithmetic is wrong, or its libraries differ"
                findings.append(Finding("bad", name, why, fix))
            elif check.seconds > SLOW_DEVICE_FACTOR * median:
                why = f"{check.seconds / median:.1f} times as slow as its peers ({kind})"
                findings.append(Finding("note", name, why, "check for heat, a power limit, or other processes"))
        if same_kind:
            why = f"{len(same_kind)} of {kind}: a product in {1000 * median:.1f} ms"
            findings.append(Finding("good", "devices", why))
    return findings


def compare_versions(by_node: dict[str, dict[str, str]]) -> list[Finding]:
    findings = []
    for name in sorted({name for found in by_node.values() for name in found}):
        counts = Counter(found.get(name, "none") for found in by_node.values())
        usual = counts.most_common(1)[0][0]
        findings += [
            Finding(
                "bad",
                f"{node}, {name}",
                f"{found.get(name, 'none')}, where others have {usual}",
                "install the same on every node",
            )
            for node, found in by_node.items()
            if found.get(name, "none") != usual
        ]
    return findings


GIB = 2**30
MIN_SHM_BYTES, MIN_OPEN_FILES, DISK_PROBE_BYTES = GIB, 4096, 32 * 2**20
MIN_DISK_BYTES = 10 * GIB


def check_node(directory: Path) -> Iterator[Finding]:
    """All checks that need no other node. ``directory`` is where runs will be written."""
    if (free := free_memory()) is not None:
        yield finding_if(
            wrong=free < 2 * GIB,
            level="note",
            what="memory",
            why=f"{show_bytes(free)} free",
            remedy="stop other processes, or use a machine with more",
        )
    yield from _check_shared_memory()
    yield from _check_limits()
    yield _check_disk(directory)
    yield from _check_settings()


def _check_shared_memory() -> Iterator[Finding]:
    place = Path("/dev/shm")
    if place.exists():
        size = os.statvfs(place)
        total, free = size.f_frsize * size.f_blocks, size.f_frsize * size.f_bavail
        yield finding_if(
            wrong=min(total, free) < MIN_SHM_BYTES,
            level="bad",
            what="/dev/shm",
            why=f"{show_bytes(free)} of {show_bytes(total)} free",
            remedy="flash checkpoints and NCCL need it: docker run --shm-size=16g, or an emptyDir of medium Memory; "
            "remove what old runs left (z2a-*)",
        )


def _check_limits() -> Iterator[Finding]:
    """Limits that several ranks need, so only where they can run."""
    if sys.platform != "linux":
        return
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = files == resource.RLIM_INFINITY
    yield finding_if(
        wrong=not unlimited and files < MIN_OPEN_FILES,
        level="bad",
        what="open files",
        why="no limit" if unlimited else f"at most {files}",
        remedy=f"ulimit -n 65536 (every rank connects to every other; at least {MIN_OPEN_FILES})",
    )
    if Path("/sys/class/infiniband").exists():
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        yield finding_if(
            wrong=locked != resource.RLIM_INFINITY,
            level="bad",
            what="locked memory",
            why="no limit" if locked == resource.RLIM_INFINITY else f"at most {show_bytes(locked)}",
            remedy="ulimit -l unlimited: InfiniBand registers memory that must not move",
        )


def _check_disk(directory: Path) -> Finding:
    """Write, drop from the page cache and read back; the bytes must be the same."""
    data = os.urandom(1 << 20) * (DISK_PROBE_BYTES >> 20)
    path = directory / f".z2a-doctor-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        with open(path, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
            wrote = time.perf_counter() - begin
            if hasattr(os, "posix_fadvise"):  # so that the read comes from the disk, not from memory
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        same = hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(data).digest()
        read = time.perf_counter() - begin
        free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    except OSError as error:
        return Finding(
            "bad", "disk", f"{directory}: {error}", "free space, fix its permissions, or run elsewhere (out=DIR)"
        )
    finally:
        with suppress(OSError):
            path.unlink()
    writes, reads = (f"{show_bytes(DISK_PROBE_BYTES / seconds)}/s" for seconds in (wrote, read))
    speeds = f"writes {writes}, reads {reads}, {show_bytes(free)} free"
    if not same:
        return Finding("bad", "disk", f"{directory} returns other bytes than were written", "replace it")
    return finding_if(
        wrong=free < MIN_DISK_BYTES,
        level="note",
        what="disk",
        why=f"{directory} {speeds}",
        remedy="free space: checkpoints would fill it",
    )


def _check_settings() -> Iterator[Finding]:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = os.environ.get(name, "").lstrip("=^")
        there = [interface for _, interface in socket.if_nameindex()]
        missing = [part for part in wanted.split(",") if part and not any(one.startswith(part) for one in there)]
        if missing:
            yield Finding(
                "bad",
                name,
                f"{', '.join(missing)} is not here (there are {', '.join(there)})",
                f"set it to one of them, or unset {name}",
            )
    if torch.cuda.device_count() > 1 and os.environ.get("NCCL_P2P_DISABLE") == "1":
        yield Finding("note", "NCCL_P2P_DISABLE", "GPUs do not communicate directly", "unset it")
    if Path("/sys/class/infiniband").exists() and os.environ.get("NCCL_IB_DISABLE") == "1":
        yield Finding("note", "NCCL_IB_DISABLE", "InfiniBand is available but not used", "unset it")


def check_device(device: torch.device) -> DeviceCheck:
    size = 4096 if device.type == "cuda" else 512
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator).to(device) for _ in range(2))
    digests, times = [], []
    for _ in range(6):
        begin = time.perf_counter()
        product = (left @ right).cpu()  # the copy waits for the device
        times.append(time.perf_counter() - begin)
        digests.append(hashlib.sha256(product.numpy().tobytes()).hexdigest()[:16])
    threads = f" with {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return DeviceCheck(device_name(device) + threads, statistics.median(times[1:]), digests[0], len(set(digests)) == 1)


def library_versions() -> dict[str, str]:
    """What must be the same on every node."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "zero2all": __version__}
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        driver = Path("/sys/module/nvidia/version")
        found["driver"] = driver.read_text().strip() if driver.exists() else "?"
    return found
