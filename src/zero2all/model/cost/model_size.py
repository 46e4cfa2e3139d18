"""What a model is made of, before any of it is built: parameters and cache; with an optimizer the dtype of the weights
and the bytes of its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from zero2all.model.z2all import Z2all
from zero2all.recipe import ModelConfig, OptimizerRecipe
from zero2all.recipe.optimizer_plugin import ROUTER

# Where a parameter belongs, by a substring of its name; the first match wins.
_COMPONENTS = {
    "embed_tokens": "embedding",
    "lm_head": "head",
    "mtp.": "multi-token prediction",
    "norm": "norms",
    "self_attn": "attention",
    ".gate.": "router",
    ".experts.": "experts",
    ".shared_experts.": "shared experts",
    "mlp": "feed-forward",
}


@dataclass(frozen=True)
class ParameterCounts:
    parts: dict[str, int]
    total: int
    active: int
    """Parameters that a token goes through: of the experts, only its own."""
    in_products: int
    """Active ones that a token is multiplied with: not the embedding, which is looked up. The N of 6N."""


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """
    >>> count_parameters(ModelConfig(preset="z2all-1.1b")).total
    1255499776
    """
    parts: dict[str, int] = {}
    idle = 0
    for name, parameter in _meta_parameters(config):
        part = next(part for substring, part in _COMPONENTS.items() if substring in name)
        parts[part] = parts.get(part, 0) + parameter.numel()
        if config.moe is not None and ".experts." in name:
            idle += (
                parameter.numel() * (config.moe.num_experts - config.moe.num_experts_per_tok) // config.moe.num_experts
            )
    total = sum(parts.values())
    looked_up = 0 if config.tie_word_embeddings else parts["embedding"]
    return ParameterCounts(parts, total, total - idle, total - idle - looked_up)


def non_embedding_parameters(config: ModelConfig) -> int:
    """Active parameters without embedding, head and multi-token prediction: the N of scaling laws."""
    # The vocabulary does not matter, and may not be known yet.
    counts = count_parameters(config.model_copy(update={"vocab_size": 64, "mtp_weight": 0.0}))
    return counts.active - counts.parts["embedding"] - counts.parts.get("head", 0)


@lru_cache(maxsize=16)
def _meta_parameters(config: ModelConfig) -> Sequence[tuple[str, nn.Parameter]]:
    """Every parameter without its memory. Ops named in a recipe may not run here, and change no parameter."""
    with torch.device("meta"):
        return tuple(Z2all(config).named_parameters())


def kv_cache_bytes_per_token(config: ModelConfig, element: int = 2) -> int:
    """Keys and values of one position in all layers, in bf16 by default."""
    return config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_size * element


def weight_dtype(optimizer: OptimizerRecipe, name: str = "") -> torch.dtype:
    """In which weights, or the parameter ``name``, are stored; gradients are in the same. Routers are in fp32."""
    return torch.bfloat16 if optimizer.has_bf16_weights and ROUTER not in name else torch.float32


def optimizer_state_bytes(optimizer: OptimizerRecipe, name: str, shape: Sequence[int]) -> int:
    """Bytes of optimizer state for a shard of this shape of the parameter ``name``, without its step counter.

    >>> optimizer_state_bytes(OptimizerRecipe(name="lion"), "lm_head.weight", (10, 100))
    4000
    >>> optimizer_state_bytes(OptimizerRecipe(name="adafactor"), "lm_head.weight", (10, 100))
    440
    """
    return optimizer.plugin.state_bytes(optimizer, name, shape)
