"""How busy the machine is, from /proc and, where nvidia-ml-py and a GPU are there, from NVML. No figure, no entry."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any

GIB = 2**30


class System:
    """Each call of ``read`` gives the figures since the one before."""

    def __init__(self) -> None:
        self._at, self._busy = time.monotonic(), time.process_time()
        self._devices = _gpus()

    def read(self) -> dict[str, float]:
        now, busy = time.monotonic(), time.process_time()
        took = max(now - self._at, 1e-3)
        found = {"system/cpu_cores": round((busy - self._busy) / took, 3)}
        self._at, self._busy = now, busy
        with suppress(OSError, ValueError):
            found["system/memory_gib"] = _resident_gib()
            found["system/machine_memory_gib"] = _machine_memory_gib()
        with suppress(OSError):
            found["system/load"] = round(os.getloadavg()[0], 2)
        for number, device in enumerate(self._devices):
            found.update(_gpu_figures(number, device))
        return found


def _resident_gib() -> float:
    with open("/proc/self/statm", encoding="ascii") as stream:
        return round(int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB, 3)


def _machine_memory_gib() -> float:
    """Memory of the machine that cannot be had for the asking."""
    with open("/proc/meminfo", encoding="ascii") as stream:
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in stream if line.strip()}
    return round((sizes["MemTotal"] - sizes["MemAvailable"]) * 1024 / GIB, 3)


def _gpus() -> list[Any]:
    try:
        import pynvml

        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no package, no driver, no permission: there is nothing to show then
        return []


def _gpu_figures(number: int, device: Any) -> dict[str, float]:
    import pynvml

    try:
        use, memory = pynvml.nvmlDeviceGetUtilizationRates(device), pynvml.nvmlDeviceGetMemoryInfo(device)
        return {
            f"gpu{number}/busy_percent": float(use.gpu),
            f"gpu{number}/memory_gib": round(memory.used / GIB, 3),
            f"gpu{number}/watts": pynvml.nvmlDeviceGetPowerUsage(device) / 1000,
            f"gpu{number}/celsius": float(pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU)),
        }
    except pynvml.NVMLError:
        return {}
