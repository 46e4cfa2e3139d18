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

    Scores count every pair of the sequence, also those that the causal mask leaves out: PaLM, Megatron and torch's
    counter do so, and a utilisation is only worth something beside theirs. ``causal`` has the other count.
    """

    projections: int
    """Query, key, value and output matrices."""
    scores: int
    """Queries times keys, and weights times values."""
    mlp: int
    """Of the experts, those that a token goes to; the router too."""
    head: int
    last_projection: int
    """The part of ``mlp`` that is the last product of its block: recomputation stops before it, for nothing needs it."""
    seq_len: int

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
        left_out = self.scores * (self.seq_len - 1) // (2 * self.seq_len)
        return self.model - 3 * left_out

    def hardware(self, recompute: Recompute = "none", fused_attention: bool = True) -> int:
        """What the device really computes. HFU counts these.

        Fused attention keeps no scores, so its backward computes them once more: five products for two. With
        ``recompute="full"`` (activation checkpointing) each block runs forward once more, but for its last product.
        """
        again = self.scores // 2 if fused_attention else 0
        if recompute == "full":
            again += self.forward - self.head - self.last_projection
        return self.model + again


def flops_per_token(config: ModelConfig, seq_len: int | None = None) -> Flops:
    """``seq_len`` is the context of the model if not given."""
    if config.vocab_size is None:
        raise ValueError("model.vocab_size is not set: take it from the tokenizer")
    length = seq_len or config.context
    heads = config.n_heads + 2 * config.n_kv_heads + config.n_heads  # q, k and v, o
    layers, hidden, wide = config.n_layers, config.hidden_size, config.intermediate_size
    return Flops(
        projections=2 * layers * hidden * heads * config.head_size,
        scores=2 * layers * 2 * config.n_heads * config.head_size * length,
        mlp=2 * layers * 3 * hidden * wide,
        head=2 * hidden * config.vocab_size,
        last_projection=2 * layers * hidden * wide,
        seq_len=length,
    )
