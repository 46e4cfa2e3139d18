"""What a model is made of, before any of it is built: parameters, cache, and the memory that training takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zero2all.model.z2all import Z2all
from zero2all.recipe import ModelConfig

# Where a parameter belongs, by a piece of its name; the first that fits wins.
_PARTS = {
    "embed_tokens": "embedding",
    "lm_head": "head",
    "norm": "norms",
    "self_attn": "attention",
    ".experts.": "experts",
    "mlp": "mlp",
}


@dataclass(frozen=True)
class Parameters:
    parts: dict[str, int]
    total: int
    active: int
    """Those that a token goes through: of the experts, only its own."""
    in_products: int
    """Active ones that are matrices multiplied with the token: without the look-up of the embedding. 6N counts these."""


def count_parameters(config: ModelConfig) -> Parameters:
    """
    >>> count_parameters(ModelConfig(preset="z2all-1.1b")).total
    1255499776
    """
    with torch.device("meta"):
        named = list(Z2all(config).named_parameters())
    parts: dict[str, int] = {}
    for name, parameter in named:
        part = next((part for piece, part in _PARTS.items() if piece in name), "other")
        parts[part] = parts.get(part, 0) + parameter.numel()
    total = sum(parts.values())
    idle = 0
    if config.moe is not None:
        idle = parts["experts"] * (config.moe.experts - config.moe.top_k) // config.moe.experts
    looked_up = 0 if config.tied else parts["embedding"]
    return Parameters(parts, total, total - idle, total - idle - looked_up)


def cache_bytes_per_token(config: ModelConfig, element: int = 2) -> int:
    """Keys and values of one position in all layers, in bf16 by default."""
    return config.n_layers * 2 * config.n_kv_heads * config.head_size * element
