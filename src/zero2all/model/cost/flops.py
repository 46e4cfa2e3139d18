"""Floating-point operations of one token, by part, from the shape alone. A multiply and an add are two.

Counted are the matrix products, as in every published utilisation; norms, rotary positions and activations are less
than a hundredth of them at any useful size.

>>> flops = flops_per_token(ModelConfig(preset="z2all-1.1b"), seq_len=2048)
>>> flops.forward, flops.model
(2616459264, 7849377792)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zero2all.recipe import ModelConfig

Recompute = Literal["none", "selective", "full"]
"""What activation checkpointing computes a second time: selective keeps every product, so none that is counted."""


@dataclass(frozen=True)
class Flops:
    """FLOPs of the forward pass of one token in a sequence, on average.

    Scores count every pair of the sequence (or of the window), also those that the causal mask leaves out: PaLM,
    Megatron and torch's counter do so, and a utilisation is only worth something beside theirs. ``causal`` has the
    other count.
    """

    projections: int
    """Query, key, value and output matrices."""
    scores: int
    """Queries times keys, and weights times values."""
    mlp: int
    """The feed-forward layers: of the experts, only the ones that a token goes to; the router too."""
    head: int
    causal_scores: int
    """``scores`` of the pairs that the causal mask lets through."""
    recomputed: tuple[int, ...]
    """What recomputation runs again in each layer: all but the product that ends the block, which no gradient needs.
    The block of multi-token prediction is not checkpointed."""
    last_products: tuple[int, ...]
    """The product that ends the block of each layer: the next block of a group that is recomputed needs it."""

    @property
    def forward(self) -> int:
        return self.projections + self.scores + self.mlp + self.head

    @property
    def model(self) -> int:
        """Forward and backward as the mathematics needs them: a product has two in the backward. MFU counts these."""
        return 3 * self.forward

    @property
    def causal(self) -> int:
        """``model`` without the pairs that the causal mask leaves out: S * (S + 1) / 2 of S * S remain."""
        return self.model - 3 * (self.scores - self.causal_scores)

    def hardware(self, recompute: Recompute = "none", every: int = 1) -> int:
        """What the device really computes. HFU counts these.

        Fused attention keeps no scores, so its backward computes them once more: five products for two. With
        ``recompute="full"`` (activation checkpointing) each block, or each group of ``every`` blocks, runs forward once
        more; ``selective`` repeats norms, rotary positions and activations, but no product.
        """
        again = self.scores // 2
        if recompute == "full":
            layers = len(self.recomputed)
            again += sum(self.recomputed)
            again += sum(self.last_products[layer] for layer in range(layers - 1) if (layer + 1) % every)
        return self.model + again


def flops_per_token(config: ModelConfig, seq_len: int | None = None) -> Flops:
    """In training, so with the block and the head of multi-token prediction, if any.

    ``seq_len`` is the context of the model if not given.
    """
    length = seq_len or config.max_position_embeddings
    hidden, heads = config.hidden_size, config.num_attention_heads * config.head_size
    keys = 2 * config.num_key_value_heads * config.head_size
    layers = list(range(config.num_hidden_layers))
    if config.mtp_weight:
        layers.append(config.num_hidden_layers - 1)  # its further block is made like the last one
    windows = [min(config.layer_window(layer) or length, length) for layer in layers]
    # A window of w sees 1, 2, ... w keys at the first w positions, and w at each one after.
    seen = sum(window * (window + 1) / 2 + window * (length - window) for window in windows) / length
    mlp, last = zip(*(_feed_forward(config, layer) for layer in layers), strict=True)
    projections = 2 * hidden * (heads + keys + heads)  # of a layer
    joining = 4 * hidden**2 if config.mtp_weight else 0
    return Flops(
        projections=len(layers) * projections + joining,
        scores=4 * heads * sum(windows),
        mlp=sum(mlp),
        head=2 * hidden * config.padded_vocab_size * (2 if config.mtp_weight else 1),
        causal_scores=round(4 * heads * seen),
        recomputed=tuple(
            projections + 4 * heads * windows[layer] + mlp[layer] - last[layer]
            for layer in range(config.num_hidden_layers)
        ),
        last_products=last[: config.num_hidden_layers],
    )


def palm_flops_per_token(config: ModelConfig, parameters: int, seq_len: int) -> int:
    """The count of PaLM's paper (https://arxiv.org/abs/2204.02311, appendix B), which many trainers print: 6N + 12LHQT.

    N is every parameter that is active for a token, also the embedding that is looked up; L layers, H heads of size Q
    and T tokens see the whole sequence, whatever their window. ``Flops.model`` leaves out what is not computed.

    >>> palm_flops_per_token(ModelConfig(preset="z2all-1.1b"), parameters=1_255_499_776, seq_len=2048)
    8640294912
    """
    heads = config.num_attention_heads * config.head_size
    return 6 * parameters + 12 * config.num_hidden_layers * heads * seq_len


def _feed_forward(config: ModelConfig, layer: int) -> tuple[int, int]:
    """All of a layer's feed-forward part, and its last product alone."""
    moe = config.moe
    if moe is None or not config.is_moe_layer(layer):
        matrix = 2 * config.hidden_size * config.intermediate_size
        return 3 * matrix, matrix
    # What experts give is weighed, so a gradient needs it, and the shared ones are computed before: no product is last.
    expert = 2 * config.hidden_size * moe.moe_intermediate_size
    router = 2 * config.hidden_size * moe.num_experts
    return 3 * expert * (moe.num_experts_per_tok + moe.n_shared_experts) + router, 0
