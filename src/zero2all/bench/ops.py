"""``z2a bench ops``: what each fused kernel saves in a training step, on this machine.

Variants: all reference kernels, all fused, all fused but one. Each runs in its own process, variants alternate, and a
variant's time is that of its fastest round: other work on the machine only ever adds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import PlainSerializer

from zero2all.bench.step import measure_in_process
from zero2all.console import say
from zero2all.errors import Z2aError
from zero2all.hardware import PeakFlops, compute_dtype, device_title, peak_flops, pick_device
from zero2all.model.cost.flops import flops_per_token
from zero2all.model.ops import choose_kernels
from zero2all.recipe import ModelConfig, OpsRecipe, Recipe
from zero2all.units import show_bytes

REFERENCE = "reference"
ALL_BUT_ADAMW = "all but adamw"


@dataclass
class OpsVariant:
    """One configuration, and the best that was measured of it."""

    name: str
    compile: bool
    plain_adamw: bool
    recipe: Recipe
    seconds: float = math.inf
    peak_bytes: int = 0
    loss: float = math.nan
    round_seconds: list[float] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True)
class OpsRow:
    """The measurements of one variant."""

    name: str
    compile: bool
    ops: OpsRecipe
    plain_adamw: bool
    seconds_per_step: float
    turns: list[float]
    """Seconds per step of each round."""
    tokens_per_second: float
    mfu: float
    peak_bytes: int
    loss: float


@dataclass(frozen=True)
class FailedOpsRow:
    """A variant that could not be measured, and the error."""

    name: str
    compile: bool
    ops: OpsRecipe
    plain_adamw: bool
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
    peak: PeakFlops
    rounds: int
    steps: int
    rows: list[OpsRow | FailedOpsRow]


def default_preset() -> str:
    """A preset whose step takes about a second."""
    return "z2all-1.1b" if torch.cuda.is_available() else "z2all-3m"


def bench_ops(
    recipe: Recipe, rounds: int = 3, steps: int = 5, compiled: bool = True, timeout: float = 600.0
) -> OpsReport:
    """Measure every variant ``rounds`` times, alternating. Returns the report; ``ops_markdown`` formats it."""
    device = pick_device(recipe.train.device)
    dtype = compute_dtype(recipe.train.compute_precision, device)
    variants = list(_variants(recipe, device, compiled))
    peak = peak_flops(device, dtype)
    for number in range(rounds):
        for variant in variants if number % 2 == 0 else variants[::-1]:
            _measure_variant(variant, steps, timeout)
        peak_flops.cache_clear()  # a machine that was busy at first has a higher peak than it seemed
        peak = max(peak, peak_flops(device, dtype), key=lambda measured: measured.flops)
        say(f"round {number + 1} of {rounds} done")
    return _report(recipe, device, dtype, variants, peak, rounds, steps)


def _variants(recipe: Recipe, device: torch.device, compiled: bool) -> Iterator[OpsVariant]:
    """Kernels are named explicitly, so that a variant means the same in every process."""
    fused = {choice.op: choice.form for choice in choose_kernels(recipe.model, device).choices}
    fast = [op for op, kernel in fused.items() if kernel != REFERENCE and (op != "experts" or recipe.model.moe)]
    tables = {"naive": dict.fromkeys(fused, REFERENCE), "all fused": fused}
    tables |= {f"all but {op}": {**fused, op: REFERENCE} for op in fast} | {ALL_BUT_ADAMW: fused}
    for compile in (False, True) if compiled else (False,):
        for name, kernels in tables.items():
            model = recipe.model.model_copy(update={"ops": recipe.model.ops.model_copy(update=kernels)})
            train = recipe.train.model_copy(update={"compile": compile})
            yield OpsVariant(
                name,
                compile,
                name in ("naive", ALL_BUT_ADAMW),
                recipe.model_copy(update={"model": model, "train": train}),
            )


def _measure_variant(variant: OpsVariant, steps: int, timeout: float) -> None:
    if variant.error:
        return
    try:
        measured = measure_in_process(variant.recipe, steps, variant.plain_adamw, timeout)
    except Z2aError as error:
        variant.error = str(error)
        say(f"{variant.name}{' (compiled)' if variant.compile else ''}: {variant.error}")
        return
    variant.round_seconds.append(statistics.median(measured.seconds))
    variant.seconds = min(variant.round_seconds)
    variant.peak_bytes = max(variant.peak_bytes, measured.peak_bytes)
    variant.loss = measured.loss


def _report(
    recipe: Recipe,
    device: torch.device,
    dtype: torch.dtype,
    variants: list[OpsVariant],
    peak: PeakFlops,
    rounds: int,
    steps: int,
) -> OpsReport:
    options = recipe.train
    flops = flops_per_token(recipe.model, options.seq_len)
    return OpsReport(
        device=device_title(device),
        dtype=str(dtype).removeprefix("torch."),
        torch=str(torch.__version__),
        model=recipe.model,
        batch_tokens=options.tokens_per_step,
        micro_batch_tokens=options.effective_micro_batch_tokens,
        seq_len=options.seq_len,
        flops_per_token=flops.model,
        peak=peak,
        rounds=rounds,
        steps=steps,
        rows=[_report_row(variant, options.tokens_per_step, flops.model, peak) for variant in variants],
    )


def _report_row(variant: OpsVariant, batch_tokens: int, flops_per_token: int, peak: PeakFlops) -> OpsRow | FailedOpsRow:
    ops = variant.recipe.model.ops
    if variant.error:
        return FailedOpsRow(variant.name, variant.compile, ops, variant.plain_adamw, variant.error)
    rate = batch_tokens / variant.seconds
    return OpsRow(
        variant.name,
        variant.compile,
        ops,
        variant.plain_adamw,
        seconds_per_step=variant.seconds,
        turns=variant.round_seconds,
        tokens_per_second=rate,
        mfu=rate * flops_per_token / peak.flops,
        peak_bytes=variant.peak_bytes,
        loss=variant.loss,
    )


def ops_markdown(report: OpsReport) -> str:
    """The report as Markdown tables, eager and compiled."""
    shape = report.model
    lines = [
        f"{shape.preset or 'custom shape'}: hidden {shape.hidden_size}, {shape.num_hidden_layers} layers, "
        f"{report.batch_tokens} tokens a step in sequences of {report.seq_len}, {report.dtype}, "
        f"on {report.device}, torch {report.torch}.",
        f"MFU is against {report.peak.flops / 1e12:,.2f} TFLOP/s ({report.peak.source}); "
        f"fastest of {report.rounds} turns, each the median of {report.steps} steps.",
    ]
    for compile in (False, True):
        rows = [row for row in report.rows if row.compile is compile]
        if rows:
            lines += ["", f"**{'torch.compile, block by block' if compile else 'eager'}**", ""]
            lines += ["| ops | s/step | MFU | tokens/s | peak memory |", "|---|---:|---:|---:|---:|"]
            lines += map(_markdown_row, rows)
    return "\n".join(lines) + "\n"


def _markdown_row(row: OpsRow | FailedOpsRow) -> str:
    if isinstance(row, FailedOpsRow):
        return f"| {row.name} | failed: {row.failed} | | | |"
    return (
        f"| {row.name} | {row.seconds_per_step:.3f} | {row.mfu:.1%} "
        f"| {row.tokens_per_second:,.0f} | {show_bytes(row.peak_bytes)} |"
    )
