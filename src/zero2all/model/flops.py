"""Floating-point operations of one token, by part, from the shape alone. A multiply and an add are two.

Counted are the matrix products, as in every published utilisation; norms, rotary positions and activations are less
than a hundredth of them at any useful size.

>>> flops = flops_per_token(ModelConfig(preset="z2all-1.1b"), seq_len=2048)
>>> flops.forward, flops.model
(2788163584, 8364490752)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zero2all.recipe import ModelConfig

Recompute = Literal["none", "full"]


@dataclass(frozen=True)
class Flops:
    """Of the forward pass of one token in a sequence, on average.

    Scores count every pair of the sequence (or of the window), also those that the causal mask leaves out: PaLM,
    Megatron and torch's counter do so, and a utilisation is only worth something beside theirs. ``causal`` has the
    other count.
    """

    projections: int
    """Query, key, value and output matrices."""
    scores: int
    """Queries times keys, and weights times values."""
    mlp: int
    """Of the experts, those that a token goes to; the router too."""
    head: int
    causal_scores: int
    """``scores`` of the pairs that the causal mask lets through."""
    last_products: int
    """The part of ``mlp`` that ends a dense block: recomputation stops before it, for no gradient needs it."""

    @property
    def forward(self) -> int:
        return self.projections + self.scores + self.mlp + self.head

    @property
    def model(self) -> int:
        """Forward and backward as the mathematics needs them: each product has two in the backward. MFU counts these."""
        return 3 * self.forward

    @property
    def causal(self) -> int:
        """``model`` without the pairs that the causal mask leaves out: S * (S + 1) / 2 of S * S remain."""
        return self.model - 3 * (self.scores - self.causal_scores)

    def hardware(self, recompute: Recompute = "none", fused_attention: bool = True) -> int:
        """What the device really computes. HFU counts these.

        Fused attention keeps no scores, so its backward computes them once more: five products for two. With
        ``recompute="full"`` (activation checkpointing) each block runs forward once more.
        """
        again = self.scores // 2 if fused_attention else 0
        if recompute == "full":
            again += self.forward - self.head - self.last_products
        return self.model + again


def flops_per_token(config: ModelConfig, seq_len: int | None = None) -> Flops:
    """``seq_len`` is the context of the model if not given."""
    length = seq_len or config.context
    hidden, heads = config.hidden_size, config.n_heads * config.head_size
    keys = 2 * config.n_kv_heads * config.head_size
    layers = range(config.n_layers)
    windows = [min(config.window(layer) or length, length) for layer in layers]
    # A window of w sees 1, 2, ... w keys at the first w positions, and w at each one after.
    seen = sum(window * (window + 1) / 2 + window * (length - window) for window in windows) / length
    dense = sum(not config.has_experts(layer) for layer in layers)
    down = 2 * hidden * config.intermediate_size
    return Flops(
        projections=2 * config.n_layers * hidden * (heads + keys + heads),
        scores=4 * heads * sum(windows),
        mlp=dense * 3 * down + (config.n_layers - dense) * _experts(config),
        head=2 * hidden * config.vocab_rows,
        causal_scores=round(4 * heads * seen),
        last_products=dense * down,
    )


def _experts(config: ModelConfig) -> int:
    if config.moe is None:
        return 0
    wide = (config.moe.top_k + config.moe.shared_experts) * config.moe.expert_intermediate
    return 2 * config.hidden_size * (3 * wide + config.moe.experts)
