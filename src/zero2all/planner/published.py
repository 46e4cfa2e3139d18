"""Formulas that published numbers were computed with, so that a plan can stand beside them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ZeroPaper:
    """Bytes of weights, gradients and optimizer as https://arxiv.org/abs/1910.02054 counts them.

    fp16 weights and gradients take 2 bytes per parameter each, fp32 weights and the two moments of Adam 12.
    """

    weights: int
    gradients: int
    optimizer: int
    ranks: int
    stages: list[int]
    """On each of the ranks. Stage 0 shards nothing, 1 the optimizer, 2 also gradients, 3 also weights."""

    @classmethod
    def of(cls, parameters: int, ranks: int) -> ZeroPaper:
        """``ranks`` are data-parallel.

        >>> [round(size / 1e9, 1) for size in ZeroPaper.of(7_500_000_000, ranks=64).stages]
        [120.0, 31.4, 16.6, 1.9]
        """
        optimizer, gradients, weights = in_order = (12 * parameters, 2 * parameters, 2 * parameters)
        stages = [sum(in_order[:zero]) // ranks + sum(in_order[zero:]) for zero in range(4)]
        return cls(weights, gradients, optimizer, ranks, stages)


INFERENCE_BYTES = {"fp32 and bf16": 6, "fp32": 4, "bf16": 2, "int8": 1}
"""For each parameter, by precision of the weights."""


def bloom_tflops(
    billions: float, seq_len: int, batch_samples: int, seconds: float, gpus: int, recomputes: bool
) -> float:
    """TFLOP/s of a GPU: model size x 4 x 2 x tokens, with 3 in place of 4 without activation checkpointing.

    >>> round(bloom_tflops(52, 2048, 1024, seconds=127, gpus=64, recomputes=True), 1)
    107.3
    """
    return billions * (4 if recomputes else 3) * 2 * seq_len * batch_samples / (seconds * gpus * 1e3)


def gpt_layer_flops(batch: int, seq_len: int, hidden: int) -> int:
    """Of the forward pass of one GPT layer: 24 B s h^2 + 4 B s^2 h."""
    return 24 * batch * seq_len * hidden**2 + 4 * batch * seq_len**2 * hidden


def failure_probability(each: float, count: int) -> float:
    """That at least one of ``count`` fails: 1 - (1 - p)^n.

    >>> round(failure_probability(0.01, 128), 4)
    0.7237
    """
    return float(1 - (1 - each) ** count)
