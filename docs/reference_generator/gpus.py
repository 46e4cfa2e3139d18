"""The table of GPUs that a plan knows, from gpu_specs.toml."""

from __future__ import annotations

from reference_generator.markdown import table
from zero2all.base.machine.gpu_specs import GPUS, Gpu

HEADS = (
    "GPU", "other names", "memory, GiB", "bf16, TFLOP/s", "fp8", "fp4", "memory, TB/s", "link in a node, GB/s",
    "network, Gb/s", "efficiency", "source",
)  # fmt: skip
HEADS_CHINESE = (
    "GPU", "别名", "显存，GiB", "bf16，TFLOP/s", "fp8", "fp4", "显存带宽，TB/s", "节点内链路，GB/s",
    "网络，Gb/s", "效率", "出处",
)  # fmt: skip


def gpu_table(text: str, chinese: bool) -> str:
    heads = HEADS_CHINESE if chinese else HEADS
    return "\n" + table(list(heads), [_row(gpu) for gpu in GPUS.values()]) + "\n"


def _row(gpu: Gpu) -> list[str]:
    peaks = [_tera(gpu.peak_flops(precision)) for precision in ("fp8", "fp4")]
    return [
        f"`{gpu.name}`",
        ", ".join(f"`{alias}`" for alias in gpu.aliases),
        f"{gpu.memory / 2**30:,.0f}",
        _tera(gpu.flops) + ("" if gpu.has_bf16 else " (fp16)"),
        *peaks,
        f"{gpu.memory_bandwidth / 1e12:.3g}",
        f"{gpu.link} {gpu.link_bandwidth / 1e9:.0f}",
        f"{8 * gpu.network_bandwidth / 1e9:.4g}",
        f"{gpu.efficiency:.0%}",
        gpu.source,
    ]


def _tera(flops: float | None) -> str:
    return "" if flops is None else f"{flops / 1e12:,.5g}"
