"""The tables of docs/start/how-large.md: which presets fit on some hardware, with which settings, and how fast."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from zero2all.base.units import show_count
from zero2all.model.cost.describe import with_precision_of
from zero2all.planner.calibrated import find_entry
from zero2all.planner.cluster import Cluster
from zero2all.planner.plan import CostPlan, plan_run
from zero2all.planner.rank_plan import USABLE_MEMORY, plan_recipe_memory
from zero2all.recipe import Recipe, load_recipe_or_preset
from zero2all.train.hyperparameters import fill_hyperparameters, with_hyperparameters
from zero2all.train.micro_batch import estimate_micro_batch

ONE_CORE = str(Path(__file__).with_name("one_core.json"))  # written by 'z2a doctor --calibrate'
FULL = "parallel.activation_checkpointing=full"
SETTINGS: tuple[tuple[str, ...], ...] = (
    (),
    ("parallel.activation_checkpointing=selective",),
    (FULL,),
    (FULL, "train.optimizer.name=adamw-8bit"),
    (FULL, "parallel.offload=cpu"),
)
"""Overrides that save memory, the least slowdown first."""
BATCH = ("train.batch_tokens=null", "train.micro_batch_tokens=auto")  # as 'z2a plan PRESET' does


@dataclass(frozen=True)
class Hardware:
    gpu: str
    gpus: int
    presets: tuple[str, ...]


HARDWARE = {
    "how-large-24gb": Hardware("rtx 4090", 1, ("z2all-85m", "z2all-300m", "z2all-1.1b", "7b")),
    "how-large-8x80gb": Hardware("h100", 8, ("z2all-1.1b", "7b", "13b", "30b", "30b-a3b", "70b")),
    "how-large-64x80gb": Hardware("h100", 64, ("7b", "13b", "30b", "30b-a3b", "70b")),
}
CPU_PRESETS = ("z2all-3m", "z2all-10m", "z2all-25m", "z2all-85m")
HEADER = ("preset", "parameters", "settings", "memory of a GPU", "main memory of a node", "tokens per second", "time")
HEADER_CHINESE = ("预设", "参数量", "需要的设置", "每张 GPU 的显存", "节点内存", "每秒 token 数", "时间")
CPU_HEADER = ("preset", "parameters", "memory", "tokens per second", "1M tokens", "20 tokens per parameter")
CPU_HEADER_CHINESE = ("预设", "参数量", "内存", "每秒 token 数", "训练 100 万 token", "每个参数 20 个 token")
HOUR, DAY = 3600, 86400
UNITS = (("minutes", "分钟"), ("hours", "小时"), ("days", "天"))
NONE, NO_FIT = ("none", "无"), ("does not fit", "放不下")


def gpu_sizes(name: str, chinese: bool) -> str:
    """The rows of some GPUs."""
    return _table(HEADER_CHINESE if chinese else HEADER, _gpu_rows(name, chinese))


def cpu_sizes(chinese: bool) -> str:
    """The rows of one CPU core."""
    return _table(CPU_HEADER_CHINESE if chinese else CPU_HEADER, [_cpu_row(preset, chinese) for preset in CPU_PRESETS])


def _gpu_rows(name: str, chinese: bool) -> list[list[str]]:
    hardware = HARDWARE[name]
    cluster = Cluster.of(find_entry(hardware.gpu), hardware.gpus)
    rows = []
    for preset in hardware.presets:
        settings, plan = _first_that_fits(preset, hardware.gpu, hardware.gpus)
        shown = " ".join(f"`{one}`" for one in settings) or NONE[chinese]
        host, rate = plan.memory.host * cluster.gpus_per_node, plan.speed.tokens_per_second
        rows.append(
            [
                f"`{preset}`", show_count(plan.parameters), shown if plan.fits else NO_FIT[chinese],
                f"{plan.memory.total / 1e9:.0f} GB", f"{host / 1e9:,.0f} GB" if host else NONE[chinese],
                _rate(rate), _duration(plan.run.tokens / rate, chinese),
            ]
        )  # fmt: skip
    return rows


@functools.cache
def _first_that_fits(preset: str, gpu: str, gpus: int) -> tuple[tuple[str, ...], CostPlan]:
    """With the fewest settings, or with all of them if none fits."""
    cluster = Cluster.of(find_entry(gpu), gpus)
    for settings in SETTINGS:
        plan = plan_run(_recipe(preset, settings, cluster), cluster)
        if plan.memory.total <= USABLE_MEMORY * cluster.gpu.memory:
            break
    return settings, plan


def _recipe(preset: str, overrides: tuple[str, ...], cluster: Cluster) -> Recipe:
    """With batch size and precision chosen, and the largest micro-batch that fits."""
    recipe = load_recipe_or_preset(preset, [*BATCH, *overrides])
    recipe = with_precision_of(fill_hyperparameters(recipe), cluster.gpu)
    return with_hyperparameters(recipe, estimate_micro_batch(recipe, cluster.gpus, cluster.gpu.memory))


def _cpu_row(preset: str, chinese: bool) -> list[str]:
    """In fp32, with micro-batches of one sample."""
    cluster = Cluster.of(find_entry(ONE_CORE), 1)
    sample = load_recipe_or_preset(preset).train.seq_len
    overrides = ["train.precision=fp32", "train.batch_tokens=null", f"train.micro_batch_tokens={sample}"]
    recipe = fill_hyperparameters(load_recipe_or_preset(preset, overrides))
    plan = plan_run(recipe, cluster)
    memory = plan_recipe_memory(recipe, 1, torch.device("cpu")).peak
    rate = plan.speed.tokens_per_second
    return [
        f"`{preset}`", show_count(plan.parameters), f"{memory / 1e9:.1f} GB", _rate(rate),
        _duration(1e6 / rate, chinese), _duration(plan.run.tokens / rate, chinese),
    ]  # fmt: skip


def _rate(rate: float) -> str:
    """Tokens per second, in three digits.

    >>> _rate(89_297)
    '89,300'
    """
    return f"{round(rate, 2 - math.floor(math.log10(rate))):,.0f}"


def _duration(seconds: float, chinese: bool) -> str:
    """Minutes, hours or days, whichever is easiest to read.

    >>> _duration(1_500, False), _duration(100_000, False), _duration(1_000_000, True)
    ('25 minutes', '28 hours', '12 天')
    """
    index = 0 if seconds < 2 * HOUR else 1 if seconds < 2 * DAY else 2
    number, (english, word) = seconds / (60, HOUR, DAY)[index], UNITS[index]
    return f"{number:,.0f} {word if chinese else english}"


def _table(header: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n" + "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines) + "\n"
