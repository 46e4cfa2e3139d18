"""The KV cache of generation."""

from __future__ import annotations

import torch
from torch import Tensor

from zero2all.recipe import ModelConfig


class KVCache:
    """Keys and values of the positions seen so far, so that generation computes each position once."""

    def __init__(self, config: ModelConfig, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.num_hidden_layers, 2, batch, config.num_key_value_heads, length, config.head_size)
        self._store = torch.empty(shape, device=device, dtype=dtype)
        self.used = 0

    def extend(self, layer: int, k_BKSE: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        """Add positions to a layer and return all of them; ``used`` moves on once every layer has been here."""
        end = self.used + k_BKSE.shape[2]
        keys, values = self._store[layer]
        keys[:, :, self.used : end], values[:, :, self.used : end] = k_BKSE, v_BKSE
        return keys[:, :, :end], values[:, :, :end]
