"""``z2a bench ops``: what each kernel and each size costs in a training step, on this machine.

The rows are in ``variants``. Each row runs in its own process, rows alternate, and a row's time is its fastest
round: other work on the machine only ever adds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import PlainSerializer

from zero2all.base.charts.table import markdown_table
from zero2all.base.console import say
from zero2all.base.errors import Z2aError
from zero2all.base.machine.devices import (
    PeakFlops,
    compute_dtype,
    device_title,
    measure_peak_again,
    peak_at_least,
    peak_flops,
    pick_device,
    wants_compile,
)
from zero2all.base.units import show_bytes
from zero2all.bench.step import Clock, StepOptions, bench_config, measure_in_process
from zero2all.bench.variants import KERNELS_TABLE, StepVariant, Sweep, kernel_variants, sweep_variants
from zero2all.model.cost.flops import flops_per_token, palm_flops_per_token
from zero2all.model.cost.model_size import count_parameters
from zero2all.recipe import ModelConfig, OpsRecipe, Recipe


@dataclass
class OpsMeasurement:
    """One row, and the best that was measured of it."""

    variant: StepVariant
    seconds: float = math.inf
    peak_bytes: int = 0
    loss: float = math.nan
    clock: Clock = "wall"
    round_seconds: list[float] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True)
class RowSettings:
    """What a row measures."""

    table: str
    """``kernels``, or what the sweep changes."""
    name: str
    compile: bool
    ops: OpsRecipe
    options: StepOptions


@dataclass(frozen=True)
class OpsRow(RowSettings):
    """The measurements of one row."""

    seconds_per_step: float
    turns: list[float]
    """Seconds per step of each round."""
    tokens_per_second: float
    tflops: float
    mfu: float
    mfu_palm: float
    """The MFU by PaLM's count of FLOPs, which many others report."""
    peak_bytes: int
    loss: float


@dataclass(frozen=True)
class FailedOpsRow(RowSettings):
    """A row that could not be measured, and the error."""

    failed: str


@dataclass(frozen=True)
class OpsReport:
    """The result of ``bench_ops``."""

    device: str
    dtype: str
    torch: str
    model: Annotated[ModelConfig, PlainSerializer(lambda config: config.model_dump(mode="json", exclude={"ops"}))]
    """Without its ops, which each row has."""
    batch_tokens: int
    micro_batch_tokens: int
    seq_len: int
    flops_per_token: int
    """FLOPs of the recipe's own shape."""
    peak: PeakFlops
    clock: Clock
    rounds: int
    steps: int
    rows: list[OpsRow | FailedOpsRow]


def default_preset() -> str:
    """A preset whose step takes about a second."""
    return "z2all-1.1b" if torch.cuda.is_available() else "z2all-3m"


def bench_ops(
    recipe: Recipe,
    rounds: int = 2,
    steps: int = 5,
    compiled: bool | None = None,
    subsets: Sequence[Sequence[str]] = (),
    sweeps: Sequence[Sweep] = (),
    timeout: float = 600.0,
) -> OpsReport:
    """Measure every row ``rounds`` times, alternating. Returns the report; ``ops_markdown`` formats it.

    The rows are the kernels, or with ``sweeps`` the points of the sweeps. With ``compiled`` they are also measured
    with torch.compile; by default where training would use it.
    """
    device = pick_device(recipe.train.device)
    dtype = compute_dtype(recipe.train.compute_precision, device)
    variants = list(sweep_variants(recipe, sweeps) if sweeps else kernel_variants(recipe, device, subsets))
    also_compiled = wants_compile("auto" if compiled is None else compiled, device)
    rows = [
        OpsMeasurement(variant.with_compile(compile=compile))
        for compile in ((False, True) if also_compiled else (False,))
        for variant in variants
    ]
    peak = peak_flops(device, dtype)
    for number in range(rounds):
        for row in rows if number % 2 == 0 else rows[::-1]:
            _measure_row(row, steps, timeout)
        peak = measure_peak_again(peak, device, dtype)
        say(f"round {number + 1} of {rounds} done")
    options = recipe.train
    peak = peak_at_least(max((_row_flops(row) for row in rows if not row.error), default=0.0), peak, device, dtype)
    return OpsReport(
        device=device_title(device),
        dtype=str(dtype).removeprefix("torch."),
        torch=str(torch.__version__),
        model=recipe.model,
        batch_tokens=options.tokens_per_step,
        micro_batch_tokens=options.effective_micro_batch_tokens,
        seq_len=options.seq_len,
        flops_per_token=flops_per_token(recipe.model, options.seq_len).model,
        peak=peak,
        clock=next((row.clock for row in rows if not row.error), "wall"),
        rounds=rounds,
        steps=steps,
        rows=[_report_row(row, peak) for row in rows],
    )


def _measure_row(row: OpsMeasurement, steps: int, timeout: float) -> None:
    if row.error:
        return
    variant = row.variant
    try:
        measured = measure_in_process(variant.recipe, steps, variant.options, timeout)
    except Z2aError as error:
        row.error = str(error)
        say(f"{variant.name}{' (compiled)' if variant.compile else ''}: {row.error}")
        return
    row.round_seconds.append(statistics.median(measured.seconds))
    row.seconds = min(row.round_seconds)
    row.peak_bytes = max(row.peak_bytes, measured.peak_bytes)
    row.loss, row.clock = measured.loss, measured.clock


def _token_flops(variant: StepVariant) -> tuple[int, int]:
    """FLOPs of a token by our count and by PaLM's."""
    config, seq_len = bench_config(variant.recipe, variant.options), variant.recipe.train.seq_len
    palm = palm_flops_per_token(config, count_parameters(config).active, seq_len)
    return flops_per_token(config, seq_len).model, palm


def _row_flops(row: OpsMeasurement) -> float:
    """FLOPs per second, by the larger of both counts."""
    return row.variant.recipe.train.tokens_per_step / row.seconds * max(_token_flops(row.variant))


def _report_row(row: OpsMeasurement, peak: PeakFlops) -> OpsRow | FailedOpsRow:
    variant, recipe = row.variant, row.variant.recipe
    settings = (variant.table, variant.name, variant.compile, recipe.model.ops, variant.options)
    if row.error:
        return FailedOpsRow(*settings, row.error)
    rate = recipe.train.tokens_per_step / row.seconds
    flops, palm_flops = _token_flops(variant)
    return OpsRow(
        *settings,
        seconds_per_step=row.seconds,
        turns=row.round_seconds,
        tokens_per_second=rate,
        tflops=rate * flops / 1e12,
        mfu=rate * flops / peak.flops,
        mfu_palm=rate * palm_flops / peak.flops,
        peak_bytes=row.peak_bytes,
        loss=row.loss,
    )


def ops_markdown(report: OpsReport) -> str:
    """The report as Markdown tables, eager and compiled."""
    shape = report.model
    seconds = "CPU seconds of one thread" if report.clock == "CPU" else "seconds"
    lines = [
        f"{shape.preset or 'custom shape'}: hidden {shape.hidden_size}, {shape.num_hidden_layers} layers, "
        f"vocabulary {shape.vocab_size}, {report.batch_tokens} tokens per step in sequences of {report.seq_len}, "
        f"{report.dtype}, on {report.device}, torch {report.torch}.",
        f"MFU is against {report.peak.flops / 1e12:,.3g} TFLOP/s ({report.peak.source}), in brackets by PaLM's count; "
        f"{seconds}, fastest of {report.rounds} turns, each the median of {report.steps} steps.",
    ]
    for table in dict.fromkeys(row.table for row in report.rows):
        for compile in (False, True):
            rows = [row for row in report.rows if row.table == table and row.compile is compile]
            if rows:
                mode = "torch.compile, block by block" if compile else "eager"
                lines += ["", f"**{mode if table == KERNELS_TABLE else f'{table}, {mode}'}**", ""]
                head = (table, "s/step", "MFU", "tokens/s", "peak memory")
                lines.append(markdown_table(head, map(_cells, rows), "lrrrr"))
    return "\n".join(lines) + "\n"


def _cells(row: OpsRow | FailedOpsRow) -> tuple[str, ...]:
    if isinstance(row, FailedOpsRow):
        return row.name, f"failed: {row.failed}", "", "", ""
    mfu = f"{row.mfu:.1%} ({row.mfu_palm:.1%})"
    return row.name, f"{row.seconds_per_step:.3f}", mfu, f"{row.tokens_per_second:,.0f}", show_bytes(row.peak_bytes)
