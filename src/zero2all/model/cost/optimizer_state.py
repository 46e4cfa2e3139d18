"""The dtype in which an optimizer wants the weights, the parameters that Muon updates, and the bytes of states."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zero2all.recipe import OptimizerRecipe

ROUTER = ".mlp.gate."  # one row of scores an expert: not a map of the residual stream, so not for Muon
FP32_BYTES, BF16_BYTES = 4, 2
# torchao keeps smaller tensors, and those that are not a multiple of a block, in fp32.
MIN_8BIT_ELEMENTS, BLOCK_8BIT = 4096, 256
TABLE_8BIT_BYTES = 256 * FP32_BYTES  # what the 256 values of a code mean, for each tensor


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
