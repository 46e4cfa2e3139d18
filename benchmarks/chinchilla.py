"""Chinchilla's law: compute-optimal models, and a model that is trained on more tokens than that.

    python -m benchmarks chinchilla

Computed from the published law. The tables are in docs/plan.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common import benchmark_parser, show

from zero2all.base.charts.table import markdown_table
from zero2all.base.units import show_count


@dataclass(frozen=True)
class ParametricLaw:
    """Loss of a model of N parameters after D tokens: E + A / N^a + B / D^b."""

    floor: float
    a_scale: float
    a_exponent: float
    b_scale: float
    b_exponent: float

    def __call__(self, parameters: float, tokens: float) -> float:
        return float(self.floor + self.a_scale * parameters**-self.a_exponent + self.b_scale * tokens**-self.b_exponent)


CHINCHILLA = ParametricLaw(1.8172, 482.01, 0.3478, 2085.43, 0.3658)
"""As refitted to the published data in https://arxiv.org/abs/2404.10102; the first fit of
https://arxiv.org/abs/2203.15556 disagrees with the other two methods of that paper."""
TOKENS_PER_PARAMETER = 20.0


@dataclass(frozen=True)
class OptimalTraining:
    """A model that is trained on as many tokens as are best for its training compute."""

    parameters: float
    tokens: float
    compute: float
    """FLOPs, 6 N D."""
    loss: float


def compute_optimal_table(
    sizes: Sequence[float] = (4e8, 1e9, 1e10, 6.7e10, 1.75e11, 2.8e11, 5.2e11, 1e12),
) -> list[OptimalTraining]:
    """Chinchilla's table 3, with 20 tokens per parameter."""
    rows = []
    for size in sizes:
        tokens = TOKENS_PER_PARAMETER * size
        rows.append(OptimalTraining(size, tokens, 6 * size * tokens, CHINCHILLA(size, tokens)))
    return rows


@dataclass(frozen=True)
class OverTraining:
    """A model that is trained on more tokens than compute-optimal, beside the optimal model of the same loss."""

    tokens_per_parameter: float
    compute: float
    """Relative to the compute-optimal training of the same model."""
    loss: float
    optimal_parameters: float
    """Of the compute-optimal model with that loss: what inference saves."""
    extra_compute: float
    """Training compute relative to that model."""


def over_training_table(
    parameters: float, ratios: Sequence[float] = (20, 50, 100, 200, 500, 1000)
) -> list[OverTraining]:
    """Chinchilla's law for one model and several numbers of tokens. Compute is 6 N D."""
    rows = []
    for ratio in ratios:
        loss = CHINCHILLA(parameters, ratio * parameters)
        optimal = _optimal_parameters(loss)
        extra = ratio * parameters**2 / (TOKENS_PER_PARAMETER * optimal**2)
        rows.append(OverTraining(ratio, ratio / TOKENS_PER_PARAMETER, loss, optimal, extra))
    return rows


def _optimal_parameters(loss: float) -> float:
    """Of the model that reaches a loss with 20 tokens per parameter."""
    low, high = math.log(1e3), math.log(1e16)
    for _ in range(100):
        middle = (low + high) / 2
        size = math.exp(middle)
        low, high = (middle, high) if CHINCHILLA(size, TOKENS_PER_PARAMETER * size) > loss else (low, middle)
    return math.exp(high)


def main() -> None:
    benchmark_parser(__doc__).parse_args()
    optimal = [
        (show_count(row.parameters), show_count(row.tokens), f"{row.compute:.2e}", f"{row.loss:.3f}")
        for row in compute_optimal_table()
    ]
    show(markdown_table(("parameters", "tokens", "FLOPs", "loss"), optimal) + "\n")
    over = []
    for row in over_training_table(7e9):
        same_loss = f"{row.optimal_parameters / 1e9:.1f}B", f"{row.extra_compute:.2f}x"
        over.append((row.tokens_per_parameter, f"{row.compute:g}x", f"{row.loss:.3f}", *same_loss))
    head = "tokens per parameter", "compute", "loss", "optimal model of this loss", "compute against it"
    show(markdown_table(head, over))
