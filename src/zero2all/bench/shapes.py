"""``z2a bench shapes``: the intermediate size near 8/3 of the hidden size whose matrix products are fastest here."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from zero2all.console import progress
from zero2all.hardware import compute_dtype, device_title, pick_device, synchronize
from zero2all.recipe import Recipe

SEARCH_RANGE = 0.06  # how far from 8/3 of the hidden size is looked
SPEED_TOLERANCE = 0.02  # two speeds that differ by less are the same, and the nearer size wins


@dataclass(frozen=True)
class Timing:
    """One size: seconds of a SwiGLU layer's nine products (forward and backward), and their speed."""

    intermediate_size: int
    seconds: float
    flops: float
    parameters: int


@dataclass(frozen=True)
class ShapesReport:
    """The time of every candidate, and the best of them."""

    device: str
    dtype: str
    hidden_size: int
    tokens: int
    rounds: int
    centre: int
    """8/3 of the hidden size."""
    best: int
    sizes: list[Timing]


def bench_shapes(recipe: Recipe, rounds: int = 9, step: int = 0) -> ShapesReport:
    """Time every candidate in turn, ``rounds`` times over; the fastest counts, since a busy moment only adds time."""
    hidden, tokens = recipe.model.hidden_size, recipe.train.effective_micro_batch_tokens
    device = pick_device(recipe.train.device)
    dtype = compute_dtype(recipe.train.compute_precision, device)
    sizes = candidate_sizes(hidden, step)
    fastest = dict.fromkeys(sizes, math.inf)
    with progress("matrix products", rounds * len(sizes)) as advance:
        for number in range(rounds):
            for size in sizes if number % 2 else sizes[::-1]:
                fastest[size] = min(fastest[size], time_swiglu_layer(hidden, size, tokens, device, dtype))
                advance(1)
    timings = [
        Timing(size, seconds, 18 * tokens * hidden * size / seconds, 3 * hidden * size)
        for size, seconds in fastest.items()
    ]
    return ShapesReport(
        device=device_title(device),
        dtype=str(dtype).removeprefix("torch."),
        hidden_size=hidden,
        tokens=tokens,
        rounds=rounds,
        centre=round(8 * hidden / 3),
        best=best_size(timings, 8 * hidden / 3),
        sizes=timings,
    )


def best_size(timings: list[Timing], centre: float) -> int:
    """The nearest to the centre of those that are as good as the fastest."""
    top = max(timing.flops for timing in timings)
    good = [timing.intermediate_size for timing in timings if timing.flops >= (1 - SPEED_TOLERANCE) * top]
    return min(good, key=lambda size: abs(size - centre))


def shapes_markdown(report: ShapesReport) -> str:
    lines = [
        f"hidden {report.hidden_size}, {report.tokens} tokens, {report.dtype}, on {report.device}; "
        f"fastest of {report.rounds} turns.",
        f"Best near 8/3 x {report.hidden_size} = {report.centre}: **model.intermediate_size={report.best}**",
        "",
        "| intermediate size | GFLOP/s | ms | parameters of the layer |",
        "|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.intermediate_size} | {row.flops / 1e9:,.0f} | {1000 * row.seconds:.1f} | {row.parameters:,} |"
        for row in report.sizes
    ]
    return "\n".join(lines) + "\n"


def candidate_sizes(hidden: int, step: int = 0) -> list[int]:
    """8/3 of the hidden size itself, and the multiples of ``step`` around it (by default enough for about 12)."""
    centre = 8 * hidden / 3
    step = step or max(16, 16 * round(centre * 2 * SEARCH_RANGE / 12 / 16))
    low, high = int(centre * (1 - SEARCH_RANGE)), int(centre * (1 + SEARCH_RANGE))
    return sorted({round(centre), *range(-(-low // step) * step, high + 1, step)})


def time_swiglu_layer(hidden: int, wide: int, tokens: int, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of the products of gate, up and down: forward, gradient of the input, gradient of the weight."""
    x, y = (torch.ones(tokens, size, device=device, dtype=dtype) for size in (hidden, wide))
    up, down = (torch.ones(*size, device=device, dtype=dtype) for size in ((wide, hidden), (hidden, wide)))
    products = [(x, up.t()), (y, up), (y.t(), x)] * 2 + [(y, down.t()), (x, down), (x.t(), y)]
    # Outputs are there before the clock runs: a product is timed, not the system finding pages for it.
    outputs = {(left.shape[0], right.shape[1]): torch.mm(left, right) for left, right in products}
    synchronize(device)
    start = time.perf_counter()
    for left, right in products:
        torch.mm(left, right, out=outputs[left.shape[0], right.shape[1]])
    synchronize(device)
    return time.perf_counter() - start
