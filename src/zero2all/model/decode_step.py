"""The forward pass of one token a row, with few operations: what a small model waits for is the overhead of each.

It computes what ``Z2all.forward`` does. Shapes: B rows, K KV heads, S positions, E head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero2all.model.blocks import Attention, FeedForward
from zero2all.model.kv_cache import KVCache
from zero2all.model.lora import LoRALinear
from zero2all.model.rope_table import depends_on_length
from zero2all.model.z2all import Block, Z2all


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class DecodeStep:
    """
    >>> step = DecodeStep(model)
    >>> logits_BV = step(tokens_B, cache)  # after a prefill by the model itself
    """

    def __init__(self, model: Z2all) -> None:
        """``model`` is one that it ``supports``."""
        config = model.config
        self._model, self._heads, self._kv_heads = model, config.num_attention_heads, config.num_key_value_heads
        self._size, self._eps = config.head_size, config.rms_norm_eps
        self._layers = [_join(layer) for layer in model.layers]
        table = model.rotary_2SE.clone()
        table[1, :, : config.head_size // 2] *= -1  # what a rolled half is multiplied with
        self._rotary_2SE = table

    @staticmethod
    def supports(model: Z2all) -> bool:
        """Whether ``join_projections`` was called on a model that it can join."""
        return _is_plain(model) and all(_are_adjacent(group) for layer in model.layers for group in _projections(layer))

    def __call__(self, tokens_B: Tensor, cache: KVCache) -> Tensor:
        """The logits of the next token, [B, V]; the caller calls ``cache.advance``."""
        model, rows = self._model, len(tokens_B)
        positions_B = cache.next_positions(1)[:, 0]
        rotary = self._rotary_2SE[:, positions_B, None]
        mask = self._mask(positions_B, cache)
        x = model.residual(model.embed_tokens(tokens_B))
        dtype, norm = self._layers[0].qkv.dtype, model.ops.norm
        cos, sin = rotary
        queries, half = self._heads * self._size, self._size // 2
        for number, layer in enumerate(self._layers):
            qkv = F.linear(norm(x, layer.input_norm, self._eps).to(dtype), layer.qkv, layer.qkv_bias)
            qkv = qkv.view(rows, -1, self._size)
            qk, v = qkv[:, : self._heads + self._kv_heads], qkv[:, self._heads + self._kv_heads :]
            if layer.query_norm is not None and layer.key_norm is not None:
                q, k = qk[:, : self._heads], qk[:, self._heads :]
                qk = torch.cat([norm(q, layer.query_norm, self._eps), norm(k, layer.key_norm, self._eps)], dim=1)
            wide = qk.float()
            qk = torch.addcmul(wide * cos, wide.roll(half, -1), sin).to(dtype)
            keys, values = cache.append(number, qk[:, self._heads :], v)
            grouped = qk[:, : self._heads].view(rows, self._kv_heads, -1, self._size)
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
            x = x + F.linear(out.reshape(rows, queries), layer.out).to(x.dtype)
            gate, up = F.linear(norm(x, layer.post_norm, self._eps).to(dtype), layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down).to(x.dtype)
        logits: Tensor = model.lm_head(model.norm(x)[:, None])[:, 0]
        return logits

    def _mask(self, positions_B: Tensor, cache: KVCache) -> Tensor | None:
        """What rows shorter than the longest must not see; None if all have the same length."""
        longest = cache.longest
        if int(positions_B.min()) == longest:
            return None
        hidden = torch.arange(longest + 1, device=positions_B.device) > positions_B[:, None]
        dtype = self._layers[0].qkv.dtype
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)
        return mask[:, None, None]


def _join(layer: nn.Module) -> _Layer:
    assert isinstance(layer, Block)
    attention, feed_forward = layer.self_attn, layer.mlp
    assert isinstance(attention, Attention)
    assert isinstance(feed_forward, FeedForward)
    qkv, *biases, gate_up = map(_as_one, _projections(layer))
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=biases[0] if biases else None,
        query_norm=None if attention.q_norm is None else attention.q_norm.weight,
        key_norm=None if attention.k_norm is None else attention.k_norm.weight,
        out=attention.o_proj.weight,
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=gate_up,
        down=feed_forward.down_proj.weight,
    )


def _projections(layer: nn.Module) -> list[list[Tensor]]:
    """Weights and biases that read the same input."""
    assert isinstance(layer, Block)
    attention, feed_forward = layer.self_attn, layer.mlp
    assert isinstance(feed_forward, FeedForward)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases: list[Tensor] = [projection.bias for projection in projections if projection.bias is not None]
    weights: list[Tensor] = [projection.weight for projection in projections]
    gate_up: list[Tensor] = [feed_forward.gate_proj.weight, feed_forward.up_proj.weight]
    return [group for group in (weights, biases, gate_up) if group]


def _is_plain(model: Z2all) -> bool:
    """Dense, without windows, adapters or RoPE that depends on the length."""
    config = model.config
    plain = config.moe is None and config.sliding_window is None and not depends_on_length(config)
    return plain and not any(isinstance(module, LoRALinear) for module in model.modules())


@torch.no_grad()
def join_projections(model: Z2all) -> None:
    """Give matrices that read the same input one storage, so that ``DecodeStep`` computes them as one.

    Only for a model that is not trained: whoever holds the old storage, such as a checkpoint that is written in the
    background, would no longer see the weights. A model that cannot be joined is left as it is.
    """
    if not _is_plain(model):
        return
    for layer in model.layers:
        for group in _projections(layer):
            if _are_adjacent(group):
                continue
            joined, begin = torch.cat([part.detach() for part in group]), 0
            for part in group:
                part.data = joined[begin : begin + len(part)]
                begin += len(part)


def _are_adjacent(parts: Sequence[Tensor]) -> bool:
    """Whether they are parts of one tensor, in this order."""
    first = parts[0]
    place, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != place or part.untyped_storage().data_ptr() != storage:
            return False
        place += part.numel() * part.element_size()
    return True


def _as_one(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())
