"""Devices of this machine, their peak performance (data sheets of known GPUs, and a timed matrix product on anything
else), and its free memory."""

from __future__ import annotations

import functools
import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from zero2all.base.errors import UsageError
from zero2all.base.machine.cpus import OtherCpuUse, busy_note
from zero2all.base.machine.gpu_specs import GPUS, Gpu, find_gpu, lookup_gpu

MPS = "mps"
"""The device type of a Mac's GPU (Metal)."""
CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
# The two that torch takes for deterministic; the second is smaller and slower.
CUBLAS_DETERMINISTIC = (":4096:8", ":16:8")

_LONGEST_PRODUCT_SECONDS = 5.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class PeakFlops:
    """Peak operations per second that utilisation is measured against, and the source of the number."""

    flops: float
    source: str
    is_measured: bool = False
    """Whether it was measured here, by matrix products: a data sheet needs no second look."""
    was_busy: bool = False
    """Other programs used the CPU meanwhile, so that the peak is higher."""


def pick_gpu(name: str = "") -> Gpu:
    """Find a GPU by name; without one, take the GPU of this machine, or A100 if that is unknown."""
    if name:
        return find_gpu(name)
    here = lookup_gpu(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return here or GPUS["A100"]


def device_name(device: torch.device) -> str:
    """The product name of a GPU; of a CPU whatever the system reports."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return torch.backends.mps.get_name() if device.type == MPS else platform.processor() or "cpu"


def hardware_key(device: torch.device) -> str:
    """What a calibrated entry is kept under: the same for all machines that run as fast."""
    if device.type != "cpu":
        return device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = device_name(device)
    return f"{model}, {torch.get_num_threads()} threads"


def device_title(device: torch.device) -> str:
    """The device as the head of a table names it."""
    return f"CPU with {torch.get_num_threads()} threads" if device.type == "cpu" else device_name(device)


def pick_device(wanted: str) -> torch.device:
    """``train.device`` of a recipe: auto is the GPU that the launcher assigned if there is one, else the CPU.

    auto does not select the GPU of a Mac: no run has been made on one.

    Matrix products of fp32 are computed in fp32 from then on, without TF32, whatever the environment sets: what a
    recipe computes in fp32, such as the scores of a router, must not turn on rounding.
    """
    torch.set_float32_matmul_precision("highest")
    if wanted == MPS:
        return _pick_mps()
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("train.device is cuda, but torch sees no GPU here; use train.device=auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = _rank_device()
    torch.cuda.set_device(device)
    return device


def on_current_device(target: Callable[[], None]) -> Callable[[], None]:
    """``target`` for a new thread, which then works on the CUDA device of the thread that calls this.

    A new thread starts on device 0: its first CUDA call, even one that pins memory, would create a context there, with
    hundreds of MB of GPU 0 for each rank.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return target
    device = torch.cuda.current_device()

    def run() -> None:
        torch.cuda.set_device(device)
        target()

    return run


def gpu_pci_addresses() -> list[str]:
    """PCI addresses of the GPUs that this process sees, in CUDA's order, as the kernel writes them: 0000:17:00.0."""
    found = []
    for index in range(torch.cuda.device_count()):
        gpu: Any = torch.cuda.get_device_properties(index)  # torch's stubs lack these attributes
        found.append(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")
    return found


def use_rank_device() -> None:
    """Select the rank's device in a thread that started before the rank chose it.

    It does nothing if the process never used CUDA.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_device(_rank_device())


def _rank_device() -> torch.device:
    """The GPU that the launcher assigned to this rank."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _pick_mps() -> torch.device:
    if not torch.backends.mps.is_available():
        raise UsageError("train.device is mps, but torch sees no GPU of a Mac here; use train.device=auto")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("train.device=mps is for one process: no collective runs on it; use 'z2a train'")
    return torch.device(MPS)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on the device. To a GPU without a host sync: from pinned memory."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def fp64_device(device: torch.device) -> torch.device:
    """Where to compute in fp64: on the device itself, or on the CPU for the GPU of a Mac, which has no fp64."""
    return torch.device("cpu") if device.type == MPS else device


def set_deterministic(*, on: bool, wanted: str) -> None:
    """``train.deterministic`` of a recipe, for its ``train.device``. To be called before anything else uses the GPU.

    cuBLAS gives the same bits only with a fixed workspace, which it reads from the environment once, and torch refuses
    every product without it.
    """
    if on and wanted == MPS:
        raise UsageError(
            "train.deterministic is not possible on mps: torch does not say which of its kernels there give the same "
            "bits every time; use train.device=cpu"
        )
    if on or torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(on)  # imports torch's compiler, which takes a second
    if not on or wanted == "cpu" or not torch.cuda.is_available():
        return
    given = os.environ.get(CUBLAS_VARIABLE)
    if given is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UsageError(
            f"train.deterministic was set after CUDA was used: start with {CUBLAS_VARIABLE}={CUBLAS_DETERMINISTIC[0]}"
        )
    if given is not None and given not in CUBLAS_DETERMINISTIC:
        raise UsageError(
            f"train.deterministic cannot be kept with {CUBLAS_VARIABLE}={given}: "
            f"unset it, or set {CUBLAS_VARIABLE}={CUBLAS_DETERMINISTIC[0]}"
        )
    os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_DETERMINISTIC[0])


def wants_compile(wanted: bool | Literal["auto"], device: torch.device) -> bool:
    """What a recipe's ``train.compile`` means on a device: auto compiles on CUDA. On a CPU it gains little, and the
    compiler takes longer than a short run."""
    return device.type == "cuda" if wanted == "auto" else wanted


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """What a recipe's ``train.precision`` means here; auto is bf16 where the device computes it natively.

    GPUs that do not are fast in fp16, whose small range needs a scaled loss; CPUs that do not are fast in fp32. So are
    the GPUs of Macs: M1 and M2 emulate bf16, and little gain is reported from later ones.
    """
    if precision == "auto":
        if device.type == "cuda":
            precision = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
        else:
            has_bf16 = device.type == "cpu" and torch.cpu.get_capabilities().get("amx_tile")
            precision = "bf16" if has_bf16 else "fp32"
    return DTYPES[precision]


def dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> PeakFlops:
    """The data sheet in bf16 on a known GPU; otherwise the fastest of some large matrix products, right here.

    >>> peak_flops(torch.device("cpu")).source
    'bf16 matrix products of 2048 measured here'
    """
    if device.type == "cuda" and dtype == torch.bfloat16 and (gpu := lookup_gpu(torch.cuda.get_device_name(device))):
        return PeakFlops(gpu.flops, f"data sheet of {gpu.name}")
    size = {"cuda": 8192, MPS: 4096}.get(device.type) or _cpu_product_size(dtype)
    others = OtherCpuUse()
    flops = measure_matmul_flops(device, dtype, size)
    source = f"{dtype_name(dtype)} matrix products of {size} measured here"
    note = busy_note(others.share()) if device.type == "cpu" else ""
    if note:
        source += f" while {note}, so MFU and HFU are too high"
    return PeakFlops(flops, source, is_measured=True, was_busy=bool(note))


def measure_peak_again(before: PeakFlops, device: torch.device, dtype: torch.dtype) -> PeakFlops:
    """The higher of both: a machine that was busy has a higher peak than it seemed. A data sheet stays as it is."""
    if not before.is_measured:
        return before
    peak_flops.cache_clear()
    return max(before, peak_flops(device, dtype), key=lambda peak: peak.flops)


def peak_at_least(observed: float, before: PeakFlops, device: torch.device, dtype: torch.dtype) -> PeakFlops:
    """A peak that ``observed`` FLOPs per second do not exceed: measured again if they do, and else these themselves."""
    if observed <= before.flops:
        return before
    again = measure_peak_again(before, device, dtype)
    if observed <= again.flops:
        return again
    return PeakFlops(observed, f"the fastest step here, faster than {before.source}", is_measured=True)


def _cpu_product_size(dtype: torch.dtype) -> int:
    """2048, or 256 where that would take seconds: many CPUs have no kernel for fp16, and torch's own loop is slow."""
    small, large = 256, 2048
    left, right = (torch.zeros(small, small, dtype=dtype) for _ in range(2))
    seconds = min(time_matmul(left, right, torch.empty_like(left)) for _ in range(2))
    return large if seconds * (large / small) ** 3 < _LONGEST_PRODUCT_SECONDS else small


def measure_matmul_flops(device: torch.device, dtype: torch.dtype, size: int, seconds: float = 0.7) -> float:
    """The fastest square matrix product of at least three, in operations per second."""
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, dtype=dtype, generator=generator) for _ in range(2))
    out = torch.empty_like(left)
    time_matmul(left, right, out)  # the first one sets up threads and kernels
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        times.append(time_matmul(left, right, out))
    return 2 * size**3 / min(times)


def time_matmul(left: Tensor, right: Tensor, out: Tensor) -> float:
    """Seconds of one matrix product, synchronized."""
    synchronize(left.device)
    start = time.perf_counter()
    torch.mm(left, right, out=out)
    synchronize(left.device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == MPS:
        torch.mps.synchronize()


def free_memory() -> int | None:
    """Free memory of the machine, or of the container if less. None where the system, as macOS, does not say."""
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
