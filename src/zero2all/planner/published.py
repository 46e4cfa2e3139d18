"""Formulas that published numbers were computed with, so that a plan can stand beside them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StateBytes:
    """Bytes for each parameter that training keeps between steps."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer

    def per_rank(self, parameters: float, ranks: int, zero: int) -> float:
        """On each of ``ranks`` ranks: ZeRO 0 shards nothing, 1 the optimizer, 2 also gradients, 3 also weights
        (https://arxiv.org/abs/1910.02054).

        >>> [round(ZERO_PAPER.per_rank(7.5e9, 64, stage) / 1e9, 1) for stage in range(4)]
        [120.0, 31.4, 16.6, 1.9]
        """
        shared = (self.optimizer, self.gradients, self.weights)
        return parameters * (sum(shared[:zero]) / ranks + sum(shared[zero:]))


ZERO_PAPER = StateBytes(weights=2, gradients=2, optimizer=12)
"""fp16 weights and gradients; fp32 weights and two moments of Adam. Llama 2 70B: 140, 140 and 840 GB."""
MIXED_PRECISION = StateBytes(weights=6, gradients=4, optimizer=8)
"""fp32 and bf16 weights, fp32 gradients, two moments of AdamW: 18 bytes, what zero2all keeps without shards."""
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
