"""``z2a bench shapes``: the intermediate size near 8/3 of the hidden size whose matrix products are fastest here, and
the six rules for shapes of "The Case for Co-Designing Model Architectures with Hardware"
(https://arxiv.org/abs/2401.14489).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from zero2all.base.charts.table import markdown_table
from zero2all.base.console import progress
from zero2all.base.machine.devices import compute_dtype, device_title, pick_device
from zero2all.bench.measurements import wall_seconds
from zero2all.recipe import Recipe

SEARCH_RANGE = 0.06  # how far from 8/3 of the hidden size is looked
CANDIDATES = 12
SPEED_TOLERANCE = 0.005  # two speeds that differ by less are the same, and the nearer size wins
GOOD_SPEED = 0.95  # a size with less than this of the best one's speed is worth changing
ALIGNMENT = 64  # elements of 16 bits: the 128 bytes that tensor cores load at once from A100 on


@dataclass(frozen=True)
class Timing:
    """One size: seconds of a SwiGLU layer's nine products (forward and backward), and their speed."""

    intermediate_size: int
    seconds: float
    flops: float
    parameters: int


@dataclass(frozen=True)
class ShapeRule:
    """One of the six rules, what it is about here, and whether it holds."""

    rule: str
    here: str
    holds: bool
    why: str


@dataclass(frozen=True)
class ShapesReport:
    """The time of every candidate, the best of them, and the rules."""

    device: str
    dtype: str
    hidden_size: int
    tp: int
    """The layer is sharded over this many devices; one device's products are timed."""
    tokens: int
    rounds: int
    centre: int
    """8/3 of the hidden size."""
    best: int
    sizes: list[Timing]
    rules: list[ShapeRule]


def bench_shapes(recipe: Recipe, rounds: int = 9) -> ShapesReport:
    """Time every candidate in turn, ``rounds`` times over; the fastest counts, since a busy moment only adds time."""
    hidden, tokens, tp = recipe.model.hidden_size, recipe.train.effective_micro_batch_tokens, recipe.parallel.tp
    device = pick_device(recipe.train.device)
    dtype = compute_dtype(recipe.train.compute_precision, device)
    own = _intermediate_size(recipe)
    sizes = sorted({*candidate_sizes(hidden, tp), own})
    fastest = dict.fromkeys(sizes, math.inf)
    with progress("matrix products", rounds * len(sizes)) as advance:
        for number in range(rounds):
            for size in sizes if number % 2 else sizes[::-1]:
                fastest[size] = min(fastest[size], time_swiglu_layer(hidden, size // tp, tokens, device, dtype))
                advance(1)
    timings = [
        Timing(size, seconds, 18 * tokens * hidden * (size // tp) / seconds, 3 * hidden * size)
        for size, seconds in fastest.items()
    ]
    best = best_size([timing for timing in timings if timing.intermediate_size % tp == 0], 8 * hidden / 3)
    return ShapesReport(
        device=device_title(device),
        dtype=str(dtype).removeprefix("torch."),
        hidden_size=hidden,
        tp=tp,
        tokens=tokens,
        rounds=rounds,
        centre=round(8 * hidden / 3),
        best=best,
        sizes=timings,
        rules=[*shape_rules(recipe), _swiglu_rule(own, best, timings)],
    )


def _intermediate_size(recipe: Recipe) -> int:
    moe = recipe.model.moe
    return recipe.model.intermediate_size if moe is None else moe.moe_intermediate_size


def shape_rules(recipe: Recipe) -> list[ShapeRule]:
    """The five rules that need no measurement. In the paper b is the micro-batch, s the sequence, a the heads,
    h the hidden size and t the degree of tensor parallelism."""
    model, train, tp = recipe.model, recipe.train, recipe.parallel.tp
    rows, heads = model.padded_vocab_size, model.num_attention_heads
    tokens = train.effective_micro_batch_tokens
    batch, micro_batches = tokens // train.seq_len, -(-train.tokens_per_step // tokens)
    powers = {"b*s": tokens, "h/a": model.head_size, "h/t": model.hidden_size / tp}
    return [
        ShapeRule(
            f"vocabulary divisible by {ALIGNMENT}",
            f"{rows} rows" + (f", {rows / tp:g} on each device" if tp > 1 else ""),
            rows % (ALIGNMENT * tp) == 0,
            "the head is the largest product; one row more than a multiple leaves tensor cores idle",
        ),
        ShapeRule(
            "micro-batch as large as possible",
            f"b = {batch}, at most {micro_batches} micro-batches a step on a device",
            micro_batches == 1,
            "more rows fill the device better; raise train.micro_batch_tokens until memory is full",
        ),
        ShapeRule(
            f"b*s, h/a and h/t divisible by a power of two ({ALIGNMENT} or more)",
            ", ".join(f"{name} = {value:g} ({_power_of_two(value)})" for name, value in powers.items()),
            all(value % ALIGNMENT == 0 for value in powers.values()),
            "they are dimensions of the products; multiples of 128 bytes are read at full speed",
        ),
        ShapeRule(
            "(b*a)/t whole",
            f"{batch} * {heads} / {tp} = {batch * heads / tp:g}",
            batch * heads % tp == 0,
            "attention is b*a products, which t devices share",
        ),
        ShapeRule(
            "t as small as possible",
            f"t = {tp}",
            tp == 1,
            "devices multiply smaller matrices and wait for each other; parallel.dp_shard divides memory without that",
        ),
    ]


def _power_of_two(value: float) -> str:
    """The largest that divides it."""
    return f"2^{(int(value) & -int(value)).bit_length() - 1}" if value == int(value) else "not whole"


def _swiglu_rule(own: int, best: int, timings: list[Timing]) -> ShapeRule:
    speeds = {timing.intermediate_size: timing.flops for timing in timings}
    share = speeds[own] / speeds[best]
    return ShapeRule(
        "SwiGLU: the fastest size near 8/3 of h",
        f"{own}, with {share:.0%} of the speed of {best}",
        share >= GOOD_SPEED,
        "8/3 is advice, alignment is not: a neighbour can be much faster",
    )


def best_size(timings: list[Timing], centre: float) -> int:
    """The size nearest to the centre among all that are as good as the fastest."""
    top = max(timing.flops for timing in timings)
    good = [timing.intermediate_size for timing in timings if timing.flops >= (1 - SPEED_TOLERANCE) * top]
    return min(good, key=lambda size: abs(size - centre))


def shapes_markdown(report: ShapesReport) -> str:
    lines = [
        f"hidden {report.hidden_size}, {report.tokens} tokens, {report.dtype}, on {report.device}"
        + (f", one of tp={report.tp}; " if report.tp > 1 else "; ")
        + f"fastest of {report.rounds} turns.",
        f"Best near 8/3 x {report.hidden_size} = {report.centre}: **model.intermediate_size={report.best}**",
    ]
    sizes = [
        (row.intermediate_size, f"{row.flops / 1e9:,.0f}", f"{1000 * row.seconds:.1f}", f"{row.parameters:,}")
        for row in report.sizes
    ]
    rules = [(row.rule, row.here, "yes" if row.holds else "no", row.why) for row in report.rules]
    lines += ["", markdown_table(("intermediate size", "GFLOP/s", "ms", "parameters of the layer"), sizes, "rrrr")]
    return "\n".join([*lines, "", markdown_table(("rule for shapes", "here", "holds", "why"), rules)]) + "\n"


def candidate_sizes(hidden: int, tp: int = 1) -> list[int]:
    """8/3 of the hidden size itself, and the nearest multiples of 32, or of 16 where there are few of them nearby.

    For each of ``tp`` devices they are multiples of 16.

    >>> candidate_sizes(4096)[4:9]
    [10880, 10912, 10923, 10944, 10976]
    """
    centre = 8 * hidden / 3
    step = max(16 * tp, 16 if centre * 2 * SEARCH_RANGE < 32 * CANDIDATES else 32)
    low, high = int(centre * (1 - SEARCH_RANGE)), int(centre * (1 + SEARCH_RANGE))
    multiples = sorted(range(-(-low // step) * step, high + 1, step), key=lambda size: abs(size - centre))
    return sorted({round(centre), *multiples[:CANDIDATES]})


def time_swiglu_layer(hidden: int, wide: int, tokens: int, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of the products of gate, up and down: forward, gradient of the input, gradient of the weight."""
    x, y = (torch.ones(tokens, size, device=device, dtype=dtype) for size in (hidden, wide))
    up, down = (torch.ones(*size, device=device, dtype=dtype) for size in ((wide, hidden), (hidden, wide)))
    products = [(x, up.t()), (y, up), (y.t(), x)] * 2 + [(y, down.t()), (x, down), (x.t(), y)]
    # Outputs are there before the clock runs: a product is timed, not the system finding pages for it.
    outputs = {(left.shape[0], right.shape[1]): torch.mm(left, right) for left, right in products}

    def multiply() -> None:
        for left, right in products:
            torch.mm(left, right, out=outputs[left.shape[0], right.shape[1]])

    return wall_seconds(multiply, device)
