"""System metrics from /proc and, with nvidia-ml-py and a GPU, from NVML. A metric that is unavailable is omitted."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any

from zero2all.base.machine.cpus import OtherCpuUse

GIB = 2**30


class SystemMonitor:
    """``read`` returns the metrics since the previous call."""

    def __init__(self) -> None:
        self._last_time, self._last_cpu_time = time.monotonic(), time.process_time()
        self._others = OtherCpuUse()
        self._devices = _gpus()

    def read(self) -> dict[str, float]:
        now, cpu_time = time.monotonic(), time.process_time()
        elapsed = max(now - self._last_time, 1e-3)
        metrics = {"system/cpu_cores": round((cpu_time - self._last_cpu_time) / elapsed, 3)}
        self._last_time, self._last_cpu_time = now, cpu_time
        if (others := self._others.share()) is not None:
            metrics["system/other_cpu"] = round(others, 3)
        with suppress(OSError, ValueError):
            metrics["system/memory_gib"] = _resident_gib()
            metrics["system/machine_memory_gib"] = _machine_memory_gib()
        with suppress(OSError):
            metrics["system/load"] = round(os.getloadavg()[0], 2)
        for number, device in enumerate(self._devices):
            metrics.update(_gpu_metrics(number, device))
        return metrics


def _resident_gib() -> float:
    with open("/proc/self/statm", encoding="ascii") as stream:
        return round(int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB, 3)


def _machine_memory_gib() -> float:
    """Memory of the machine in use: total minus available."""
    with open("/proc/meminfo", encoding="ascii") as stream:
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in stream if line.strip()}
    return round((sizes["MemTotal"] - sizes["MemAvailable"]) * 1024 / GIB, 3)


def _gpus() -> list[Any]:
    try:
        import pynvml

        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no package, no driver or no permission
        return []


def _gpu_metrics(number: int, device: Any) -> dict[str, float]:
    import pynvml

    try:
        utilization, memory = pynvml.nvmlDeviceGetUtilizationRates(device), pynvml.nvmlDeviceGetMemoryInfo(device)
        return {
            f"gpu{number}/busy_percent": float(utilization.gpu),
            f"gpu{number}/memory_gib": round(memory.used / GIB, 3),
            f"gpu{number}/watts": pynvml.nvmlDeviceGetPowerUsage(device) / 1000,
            f"gpu{number}/celsius": float(pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU)),
        }
    except pynvml.NVMLError:
        return {}
