"""Data sheets of GPUs, one row for each: what a plan, a utilisation and shape advice are computed from.

Peaks are dense, without sparsity. Bandwidths are those of one direction: data sheets add both for NVLink and PCIe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from zero2all.errors import UsageError

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
    """Of the numbers above."""
    fp32_flops: float | None = None
    """Default: half of ``flops``, as TF32."""
    fp8_flops: float | None = None
    fp4_flops: float | None = None
    matmul_share: float = 0.803
    """The fastest bf16 matrix product that was measured, as a share of ``flops``."""
    matmul_source: str = _LIKE_HOPPER
    gpus_per_node: int = 8
    has_bf16: bool = True
    """Whether it computes bf16 natively; without, ``flops`` are those of fp16."""
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
        """Of ``fp32`` (as TF32), ``bf16``, ``fp16``, ``fp8`` or ``fp4``; None if the GPU has no such products."""
        peaks = {"fp32": self.fp32_flops or self.flops / 2, "fp8": self.fp8_flops, "fp4": self.fp4_flops}
        return peaks.get(precision, self.flops)


_A100_SOURCE = "NVIDIA A100 Tensor Core GPU data sheet; DGX A100: 8 x HDR 200 Gb/s"
_H100_SOURCE = "NVIDIA H100 Tensor Core GPU data sheet; DGX H100: 8 x NDR 400 Gb/s"

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            "V100", 125e12, 80, 8, 32 * _GIB, 900e9, "NVLink 2", 150e9, 100 * _GBPS, "NVIDIA V100 data sheet",
            has_bf16=False,
        ),
        Gpu(
            "T4", 65e12, 40, 8, 16 * _GIB, 320e9, "PCIe 3", 16e9, 12.5 * _GBPS, "NVIDIA T4 data sheet", has_bf16=False
        ),
        Gpu("A10", 125e12, 72, 64, 24 * _GIB, 600e9, "PCIe 4", 32e9, 12.5 * _GBPS, "NVIDIA A10 data sheet"),
        Gpu(
            "A100", 312e12, 108, 64, 80 * _GIB, 2039e9, "NVLink 3", 300e9, 200 * _GBPS, _A100_SOURCE,
            matmul_share=0.859, matmul_source=_MAMF, aliases=("A100-80G", "A100-80GB", "A100-SXM"),
        ),
        Gpu(
            "A100 40GB", 312e12, 108, 64, 40 * _GIB, 1555e9, "NVLink 3", 300e9, 200 * _GBPS, _A100_SOURCE,
            matmul_share=0.859, matmul_source=_MAMF, aliases=("A100-40G",),
        ),
        Gpu(
            "A800", 312e12, 108, 64, 80 * _GIB, 2039e9, "NVLink 3", 200e9, 200 * _GBPS,
            "NVIDIA A800 data sheet: an A100 with 400 GB/s of NVLink",
            matmul_share=0.859, matmul_source=f"as A100: {_MAMF}", aliases=("A800-80G", "A800-80GB"),
        ),
        Gpu(
            "L40S", 362e12, 142, 64, 48 * _GIB, 864e9, "PCIe 4", 32e9, 50 * _GBPS, "NVIDIA L40S data sheet",
            fp8_flops=733e12,
        ),
        Gpu(
            "H20", 148e12, 78, 64, 96 * _GIB, 4000e9, "NVLink 4", 450e9, 400 * _GBPS, "NVIDIA H20 data sheet",
            fp8_flops=296e12,
        ),
        Gpu(
            "H100", 989e12, 132, 64, 80 * _GIB, 3350e9, "NVLink 4", 450e9, 400 * _GBPS, _H100_SOURCE,
            fp8_flops=1979e12, matmul_source=_MAMF, aliases=("H100-80G", "H100-SXM", "H100 SXM", "H100 HBM3"),
        ),
        Gpu(
            "H100 PCIe", 756e12, 114, 64, 80 * _GIB, 2000e9, "PCIe 5", 64e9, 100 * _GBPS, _H100_SOURCE,
            fp8_flops=1513e12, aliases=("H100-PCIe",),
        ),
        Gpu(
            "H800", 989e12, 132, 64, 80 * _GIB, 3350e9, "NVLink 4", 200e9, 400 * _GBPS,
            "DeepSeek-V3, https://arxiv.org/abs/2412.19437: an H100 with 400 GB/s of NVLink",
            fp8_flops=1979e12, aliases=("H800-80G",),
        ),
        Gpu(
            "H200", 989e12, 132, 64, 141 * _GIB, 4800e9, "NVLink 4", 450e9, 400 * _GBPS, "NVIDIA H200 data sheet",
            fp8_flops=1979e12, matmul_source=_MAMF,
        ),
        Gpu(
            "B200", 2250e12, 148, 64, 180 * _GIB, 8000e9, "NVLink 5", 900e9, 400 * _GBPS,
            "NVIDIA HGX B200 data sheet, for one of 8 GPUs",
            fp8_flops=4500e12, fp4_flops=9000e12, matmul_share=0.776, matmul_source=_MAMF,
        ),
        Gpu(
            "B300", 2250e12, 148, 64, 268 * _GIB, 8000e9, "NVLink 5", 900e9, 800 * _GBPS,
            "NVIDIA HGX B300 data sheet, for one of 8 GPUs",
            fp8_flops=4500e12, fp4_flops=13500e12, matmul_share=0.776, matmul_source="not published; as B200",
        ),
        Gpu(
            "MI300X", 1307e12, 304, 64, 192 * _GIB, 5300e9, "Infinity Fabric", 448e9, 400 * _GBPS,
            "AMD Instinct MI300X data sheet",
            fp8_flops=2615e12, matmul_share=0.601, matmul_source=_MAMF, aliases=("MI300",),
        ),
        Gpu(
            "MI355X", 2517e12, 256, 64, 288 * _GIB, 8000e9, "Infinity Fabric", 537e9, 400 * _GBPS,
            "AMD Instinct MI355X data sheet",
            fp8_flops=5033e12, fp4_flops=10066e12, matmul_share=0.601, matmul_source="not published; as MI300X",
        ),
        Gpu(
            "RTX 4090", 165e12, 128, 64, 24 * _GIB, 1008e9, "PCIe 4", 32e9, 12.5 * _GBPS,
            "NVIDIA Ada GPU architecture whitepaper, with fp32 accumulation",
            fp8_flops=330e12, aliases=("4090",),
        ),
        Gpu(
            "RTX 5090", 209.5e12, 170, 64, 32 * _GIB, 1792e9, "PCIe 5", 64e9, 12.5 * _GBPS,
            "NVIDIA RTX Blackwell GPU architecture whitepaper, with fp32 accumulation",
            fp8_flops=419e12, fp4_flops=1676e12, aliases=("5090",),
        ),
        Gpu(
            "RTX PRO 6000", 503.8e12, 188, 64, 96 * _GIB, 1792e9, "PCIe 5", 64e9, 50 * _GBPS,
            "NVIDIA RTX PRO Blackwell GPU architecture whitepaper, with fp32 accumulation",
            fp8_flops=1007.6e12, fp4_flops=2015e12, aliases=("RTX-PRO-6000", "PRO 6000"),
        ),
        Gpu(
            "Ascend 910B", 313e12, 20, 64, 64 * _GIB, 1600e9, "HCCS", 196e9, 200 * _GBPS,
            "no public data sheet; reported of Atlas 800T A2 with 910B3",
            matmul_share=0.75, matmul_source="not published; assumed", aliases=("910B",),
        ),
        Gpu(
            "Ascend 910C", 752e12, 48, 64, 128 * _GIB, 3200e9, "UB", 392e9, 400 * _GBPS,
            "CloudMatrix384, https://arxiv.org/abs/2506.12708: two dies of 376 TFLOPS",
            matmul_share=0.75, matmul_source="not published; assumed", aliases=("910C",),
        ),
    )
}  # fmt: skip


def lookup_gpu(device_name: str) -> Gpu | None:
    """``"NVIDIA A100-SXM4-80GB"`` -> the A100. A name is compared word by word: an A1000 is no A100."""
    words = device_name.replace("-", " ").split()
    matching = [gpu for gpu in GPUS.values() if all(word in words for word in gpu.name.split())]
    return max(matching, key=lambda gpu: len(gpu.name), default=None)


def find_gpu(name: str) -> Gpu:
    """By name or alias in any case; spaces and hyphens are equal.

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
