"""Data sheets of GPUs, which are in gpu_specs.toml: what a plan, a utilisation and shape advice are computed from.

Peaks are dense, without sparsity. Bandwidths count one direction: data sheets add both for NVLink and PCIe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from zero2all.base.errors import UsageError
from zero2all.base.package_data import read_package_table

TRAINING_SHARE = 2 / 3
"""Speed of the matrix products of a training step, as a share of the best product that was measured on the GPU. They
have the shapes of the model, not the best ones, and attention is slower. One value for all GPUs and models: on A100 it
gives the published speeds of Llama 2 7B and TinyLlama within 25% (tests/planner/test_published.py)."""

_GIB = 2**30
_GBPS = 1e9 / 8
_MAMF = "largest product measured by mamf-finder, https://github.com/stas00/ml-engineering (compute/accelerator)"
_LIKE_HOPPER = "not published; as H100"


@dataclass(frozen=True)
class Gpu:
    """One row of the table."""

    name: str
    """Its name in ``torch.cuda.get_device_name()``; if two match, the longer wins."""
    flops: float
    """Floating-point operations per second in bf16 with fp32 accumulation."""
    sms: int
    """Streaming multiprocessors: how many output tiles are computed at once."""
    align: int
    """Elements of 16 bits that a dimension should be a multiple of for full speed: 16 bytes on Volta and Turing,
    128 bytes from A100 on (NVIDIA, Matrix Multiplication Background User's Guide)."""
    memory: int
    """Bytes. The GB of data sheets are GiB: an A100 of 80 GB reports 79.2 GiB."""
    memory_bandwidth: float
    """Bytes per second between the GPU and its memory."""
    link: str
    """What joins the GPUs of a node."""
    link_bandwidth: float
    """Bytes per second that a GPU sends to the others of its node."""
    network_bandwidth: float
    """Bytes per second that a GPU sends to other nodes, in a usual server."""
    source: str
    """Where the numbers above come from."""
    fp32_flops: float | None = None
    """Default: half of ``flops``, as TF32."""
    fp8_flops: float | None = None
    fp4_flops: float | None = None
    matmul_share: float = 0.803
    """The fastest bf16 matrix product that was measured, as a share of ``flops``."""
    matmul_source: str = _LIKE_HOPPER
    gpus_per_node: int = 8
    has_bf16: bool = True
    """Whether it computes bf16 natively; if not, ``flops`` is its fp16 peak."""
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """An entry may come from a file."""
        numbers = ("flops", "sms", "align", "memory", "memory_bandwidth", "link_bandwidth", "network_bandwidth")
        optional = ("fp32_flops", "fp8_flops", "fp4_flops")
        for name in (*numbers, *optional, "matmul_share", "gpus_per_node"):
            value = getattr(self, name)
            if not (value is None and name in optional) and not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} of {self.name} is {value}, not a positive number")

    @property
    def efficiency(self) -> float:
        """Share of the peak that the matrix products of a training step reach."""
        return TRAINING_SHARE * self.matmul_share

    @property
    def auto_precision(self) -> Literal["bf16", "fp16"]:
        """What ``train.precision: auto`` selects on it."""
        return "bf16" if self.has_bf16 else "fp16"

    def peak_flops(self, precision: str) -> float | None:
        """The peak in ``fp32`` (as TF32), ``bf16``, ``fp16``, ``fp8`` or ``fp4``; None if the GPU lacks the format."""
        peaks = {"fp32": self.fp32_flops or self.flops / 2, "fp8": self.fp8_flops, "fp4": self.fp4_flops}
        return peaks.get(precision, self.flops)


def _gpu(name: str, entry: dict[str, Any]) -> Gpu:
    network, memory = entry.pop("network") * _GBPS, entry.pop("memory") * _GIB
    entry["matmul_source"] = entry.get("matmul_source", _LIKE_HOPPER).replace("mamf", _MAMF)
    return Gpu(name, memory=memory, network_bandwidth=network, **entry | {"aliases": tuple(entry.get("aliases", ()))})


GPUS = {name: _gpu(name, entry) for name, entry in read_package_table(__package__, "gpu_specs.toml").items()}


def lookup_gpu(device_name: str) -> Gpu | None:
    """``"NVIDIA A100-SXM4-80GB"`` -> the A100. A name is compared word by word: an A1000 is no A100."""
    words = device_name.replace("-", " ").split()
    matching = [gpu for gpu in GPUS.values() if all(word in words for word in gpu.name.split())]
    return max(matching, key=lambda gpu: len(gpu.name), default=None)


def find_gpu(name: str) -> Gpu:
    """Find a GPU by name or alias in any case; spaces and hyphens are equal.

    >>> find_gpu("a800-80g").name
    'A800'
    """
    wanted = _spelled(name)
    for gpu in GPUS.values():
        if wanted in (_spelled(known) for known in (gpu.name, *gpu.aliases)):
            return gpu
    raise UsageError(f"no data sheet of {name!r}; there are {', '.join(GPUS)}")


def _spelled(name: str) -> str:
    return name.lower().replace("-", " ")
