"""Checks of one node: memory, limits, disk and devices."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import resource
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from zero2all import __version__
from zero2all.doctor.pairs import DeviceCheck
from zero2all.findings import Finding, finding_if
from zero2all.hardware import device_name
from zero2all.units import show_bytes

GIB = 2**30
MIN_SHM_BYTES, MIN_OPEN_FILES, DISK_PROBE_BYTES = GIB, 4096, 32 * 2**20
MIN_DISK_BYTES = 10 * GIB


def check_node(directory: Path) -> Iterator[Finding]:
    """All checks that need no other node. ``directory`` is where runs will be written."""
    if (free := free_memory()) is not None:
        yield finding_if(free < 2 * GIB, "note", "memory", f"{show_bytes(free)} free",
                     "stop other processes, or use a machine with more")  # fmt: skip
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
            min(total, free) < MIN_SHM_BYTES, "bad", "/dev/shm", f"{show_bytes(free)} of {show_bytes(total)} free",
            "flash checkpoints and NCCL need it: docker run --shm-size=16g, or an emptyDir of medium Memory; "
            "remove what old runs left (z2a-*)",
        )  # fmt: skip


def _check_limits() -> Iterator[Finding]:
    """Limits that several ranks need, so only where they can run."""
    if sys.platform != "linux":
        return
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = files == resource.RLIM_INFINITY
    yield finding_if(not unlimited and files < MIN_OPEN_FILES, "bad", "open files",
                 "no limit" if unlimited else f"at most {files}",
                 f"ulimit -n 65536 (every rank connects to every other; at least {MIN_OPEN_FILES})")  # fmt: skip
    if Path("/sys/class/infiniband").exists():
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        yield finding_if(locked != resource.RLIM_INFINITY, "bad", "locked memory",
                     "no limit" if locked == resource.RLIM_INFINITY else f"at most {show_bytes(locked)}",
                     "ulimit -l unlimited: InfiniBand registers memory that must not move")  # fmt: skip


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
        free < MIN_DISK_BYTES, "note", "disk", f"{directory} {speeds}", "free space: checkpoints would fill it"
    )


def _check_settings() -> Iterator[Finding]:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = os.environ.get(name, "").lstrip("=^")
        there = [interface for _, interface in socket.if_nameindex()]
        missing = [part for part in wanted.split(",") if part and not any(one.startswith(part) for one in there)]
        if missing:
            yield Finding("bad", name, f"{', '.join(missing)} is not here (there are {', '.join(there)})",
                          f"set it to one of them, or unset {name}")  # fmt: skip
    if torch.cuda.device_count() > 1 and os.environ.get("NCCL_P2P_DISABLE") == "1":
        yield Finding("note", "NCCL_P2P_DISABLE", "GPUs do not communicate directly", "unset it")
    if Path("/sys/class/infiniband").exists() and os.environ.get("NCCL_IB_DISABLE") == "1":
        yield Finding("note", "NCCL_IB_DISABLE", "InfiniBand is available but not used", "unset it")


def free_memory() -> int | None:
    """Of the machine, or of the container if that has less. None if the system, as macOS, does not report it."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        free = int(found[1]) * 1024 if found else 0
    except OSError:
        if "SC_AVPHYS_PAGES" not in os.sysconf_names:
            return None
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        return min(free, limit - used)
    except (OSError, ValueError):
        return free


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
