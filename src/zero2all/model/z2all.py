"""The Z2all decoder: pre-norm RMSNorm, rotary positions, grouped-query attention, SwiGLU. One device, one file.

It knows nothing of how it is spread over machines. Parameter names are those of Hugging Face Llama without the
leading ``model.``, so that export is a renaming. Shapes: B batch, S sequence, D hidden, H heads, K KV heads, E head.
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero2all.recipe import ModelConfig

IGNORE = -100  # a target that counts for nothing


class KVCache:
    """Keys and values of the positions seen so far, so that generation computes each position once."""

    def __init__(self, config: ModelConfig, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.n_layers, 2, batch, config.n_kv_heads, length, config.head_size)
        self._store = torch.empty(shape, device=device, dtype=dtype)
        self.used = 0

    def extend(self, layer: int, k_BKSE: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        """Add positions to a layer and return all of them; ``used`` moves on once every layer has been here."""
        end = self.used + k_BKSE.shape[2]
        keys, values = self._store[layer]
        keys[:, :, self.used : end], values[:, :, self.used : end] = k_BKSE, v_BKSE
        return keys[:, :, :end], values[:, :, :end]


class RMSNorm(nn.Module):
    """Scale to unit root-mean-square (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # In the precision of the residual stream, then in that of the weights: the matrices after it expect theirs.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps).to(self.weight.dtype)


def rotary_table(positions: int, head_size: int, theta: float, device: torch.device | None = None) -> Tensor:
    """cos and sin of every position's angles, [2, positions, head_size] (https://arxiv.org/abs/2104.09864)."""
    exponents = torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
    angles = torch.outer(torch.arange(positions, device=device, dtype=torch.float32), 1.0 / theta**exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x_BHSE: Tensor, rotary_2SE: Tensor) -> Tensor:
    """Turn each pair (i, i + E/2) by its position's angle, in fp32: far positions need the digits."""
    cos, sin = rotary_2SE
    x = x_BHSE.float()
    low, high = x.chunk(2, dim=-1)
    turned: Tensor = x * cos + torch.cat([-high, low], dim=-1) * sin
    return turned.type_as(x_BHSE)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_size = layer, config.head_size
        self.grouped = config.n_heads != config.n_kv_heads
        queries, keys = config.n_heads * config.head_size, config.n_kv_heads * config.head_size
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else None

    def forward(self, x_BSD: Tensor, rotary_2SE: Tensor, cache: KVCache | None) -> Tensor:
        batch, length, _ = x_BSD.shape
        q, k, v = (
            projection(x_BSD).view(batch, length, -1, self.head_size).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).type_as(v), self.k_norm(k).type_as(v)
        q, k = rotate(q, rotary_2SE), rotate(k, rotary_2SE)
        mask = None
        if cache is not None:
            past = cache.used
            k, v = cache.extend(self.layer, k, v)
            if past and length > 1:  # new positions after old ones: is_causal would align them at the start
                mask = torch.ones(length, past + length, dtype=torch.bool, device=q.device).tril(past)
        causal = mask is None and length > 1
        out_BHSE = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.grouped)
        out: Tensor = self.o_proj(out_BHSE.transpose(1, 2).reshape(batch, length, -1))
        return out


class SwiGLU(nn.Module):
    """Gated feed-forward (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x_BSD: Tensor, rotary_2SE: Tensor, cache: KVCache | None = None) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rotary_2SE, cache).to(x_BSD.dtype)
        added: Tensor = self.mlp(self.post_attention_layernorm(x_BSD))
        return x_BSD + added.to(x_BSD.dtype)


class Z2all(nn.Module):
    """
    >>> model = Z2all(ModelConfig(preset="z2all-3m", vocab_size=4096)).init_weights(seed=0)
    >>> model(torch.zeros(1, 8, dtype=torch.int64)).shape  # logits
    torch.Size([1, 8, 4096])
    """

    rotary_2SE: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("model.vocab_size is not set: take it from the tokenizer")
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight
        table = rotary_table(config.context, config.head_size, config.rope_theta)
        self.register_buffer("rotary_2SE", table, persistent=False)

    @torch.no_grad()
    def init_weights(self, seed: int) -> Z2all:
        """Fill every parameter, each from (seed, its name), so that a part of the model gets what the whole would.

        Works on a model that was built on the meta device too.
        """
        if self.config.tied:
            self.lm_head.weight = self.embed_tokens.weight  # to_empty() after a meta build makes two of it
        device = self.embed_tokens.weight.device
        generator = torch.Generator(device)
        self.rotary_2SE = rotary_table(self.config.context, self.config.head_size, self.config.rope_theta, device)
        # Each block adds twice to the residual stream; this keeps its variance from growing with depth.
        into_residual = self.config.init_std / math.sqrt(2 * self.config.n_layers)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                std = into_residual if name.endswith(("o_proj.weight", "down_proj.weight")) else self.config.init_std
                own = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
                parameter.normal_(0.0, std, generator=generator.manual_seed(int.from_bytes(own)))
        return self

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Logits [B, S, V], or with targets the loss of each token [B, S] in fp32, zero where the target is IGNORE.

        Losses stay apart so that the caller divides by the tokens of the whole batch and can tell sources apart.
        """
        start = cache.used if cache is not None else 0
        length = tokens_BS.shape[1]
        if start + length > self.config.context:
            raise ValueError(f"{start + length} positions are more than the model's context of {self.config.context}")
        rotary = self.rotary_2SE[:, start : start + length]
        x_BSD = self._enter_residual(self.embed_tokens(tokens_BS))
        for layer in self.layers:
            x_BSD = layer(x_BSD, rotary, cache)
        if cache is not None:
            cache.used += length
        logits: Tensor = self.lm_head(self.norm(x_BSD))
        if targets_BS is None:
            return logits
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), targets_BS.flatten(), ignore_index=IGNORE, reduction="none"
        )
        return losses.view_as(targets_BS)

    def _enter_residual(self, x: Tensor) -> Tensor:
        if self.config.residual_fp32:
            return x.float()
        return x.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else x
