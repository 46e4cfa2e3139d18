"""What a model is made of, before any of it is built: parameters and cache; with an optimizer the dtype of the weights,
the parameters that Muon updates, and the bytes of its state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from zero2all.model.z2all import Z2all
from zero2all.recipe import ModelConfig, OptimizerRecipe

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
ROUTER = ".mlp.gate."  # one row of scores an expert: not a map of the residual stream, so not for Muon
FP32_BYTES, BF16_BYTES = 4, 2
# torchao keeps smaller tensors, and those that are not a multiple of a block, in fp32.
MIN_8BIT_ELEMENTS, BLOCK_8BIT = 4096, 256
TABLE_8BIT_BYTES = 256 * FP32_BYTES  # what the 256 values of a code mean, for each tensor


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


def updated_by_muon(name: str, dims: int) -> bool:
    """Matrices inside the blocks, experts among them (three dimensions, the first one is the expert).

    >>> updated_by_muon("layers.0.mlp.experts.up_proj", 3), updated_by_muon("layers.0.mlp.gate.weight", 2)
    (True, False)
    """
    return "layers." in name and dims >= 2 and ROUTER not in name


def optimizer_state_bytes(optimizer: OptimizerRecipe, name: str, shape: Sequence[int]) -> int:
    """Bytes of optimizer state for a shard of this shape of the parameter ``name``, without its step counter.

    >>> optimizer_state_bytes(OptimizerRecipe(name="lion"), "lm_head.weight", (10, 100))
    4000
    >>> optimizer_state_bytes(OptimizerRecipe(name="adafactor"), "lm_head.weight", (10, 100))
    440
    """
    count, itemsize = math.prod(shape), weight_dtype(optimizer, name).itemsize
    match optimizer.name:
        case "muon":
            return count * (FP32_BYTES if updated_by_muon(name, len(shape)) else 2 * FP32_BYTES)
        case "sgd":
            return count * FP32_BYTES if optimizer.momentum else 0
        case "lion":
            return count * FP32_BYTES
        case "adamw":
            return count * 2 * FP32_BYTES
        case "adamw-bf16" | "adamw-bf16-kahan":
            compensation = BF16_BYTES if optimizer.name.endswith("kahan") and itemsize == BF16_BYTES else 0
            return count * (2 * itemsize + compensation)
        case "adafactor":
            *stack, rows, columns = shape if len(shape) > 1 else (count, 0)
            return math.prod(stack) * (rows + columns) * FP32_BYTES
        case "adamw-8bit":
            if count < MIN_8BIT_ELEMENTS or count % BLOCK_8BIT:
                return count * 2 * FP32_BYTES
            return 2 * (count + count // BLOCK_8BIT * FP32_BYTES + TABLE_8BIT_BYTES)
