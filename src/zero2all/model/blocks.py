"""The parts of a block. Shapes: B batch, S sequence, D hidden, H heads, K KV heads, E head size."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero2all.model.kv_cache import Branches, KVCache
from zero2all.model.lora import projection
from zero2all.model.ops import Ops
from zero2all.model.ops.attention import attend_cached
from zero2all.model.ops.chunked_loss import chunk_rows
from zero2all.model.ops.cross_entropy import (
    HeadConfig,
    Logits,
    SoftTargets,
    compute_logits,
    likeliest_tokens,
    soft_cross_entropy,
)
from zero2all.model.ops.kernels import IGNORE_INDEX
from zero2all.recipe import ModelConfig
from zero2all.recipe.model import LoraConfig


def matmul_dtype(weight: Tensor) -> torch.dtype:
    """What matrices compute in: autocast's type, or the weights' own. Casting once for several is cheaper."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


class OpsModule(nn.Module):
    """A module that computes with the chosen kernels; ``Z2all.set_ops`` sets them."""

    ops: Ops


class RMSNorm(OpsModule):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # In the precision of the residual stream, then of the matrices after it.
        return self.ops.norm(x, self.weight, self.eps).to(matmul_dtype(self.weight))


class Attention(OpsModule):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_size, self.dropout = layer, config.head_size, config.attention_dropout
        queries, keys = config.num_attention_heads * config.head_size, config.num_key_value_heads * config.head_size
        self.q_proj = projection(config.lora, "q_proj", config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = projection(config.lora, "k_proj", config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = projection(config.lora, "v_proj", config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = projection(config.lora, "o_proj", queries, config.hidden_size)
        self.q_norm = RMSNorm(config.head_size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_size, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x_BSD: Tensor, rotary: Tensor, mask: Any, cache: KVCache | Branches | None) -> Tensor:
        batch, length, _ = x_BSD.shape
        q, k, v = (
            projection(x_BSD).view(batch, length, -1, self.head_size).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).type_as(v), self.k_norm(k).type_as(v)
        q, k = self.ops.rope(q, k, rotary)
        if cache is not None:
            out_BHSE = attend_cached(q, *cache.extend(self.layer, k, v), mask)
        elif self.dropout and self.training:
            assert self.ops.attention.attend_with_dropout is not None, "the kernel was chosen without its config"
            out_BHSE = self.ops.attention.attend_with_dropout(q, k, v, mask, self.dropout)
        else:
            out_BHSE = self.ops.attention.attend(q, k, v, mask)
        out: Tensor = self.o_proj(out_BHSE.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(OpsModule):
    def __init__(self, hidden: int, intermediate: int, lora: LoraConfig | None = None) -> None:
        super().__init__()
        self.gate_proj = projection(lora, "gate_proj", hidden, intermediate)
        self.up_proj = projection(lora, "up_proj", hidden, intermediate)
        self.down_proj = projection(lora, "down_proj", intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.ops.swiglu(self.gate_proj(x), self.up_proj(x)))
        return out


class ScoredTargets(NamedTuple):
    """Tokens to score, and the positions that predict them: N targets, several at a position if wanted."""

    rows_N: Tensor
    positions_N: Tensor
    targets_N: Tensor


class LMHead(OpsModule, nn.Linear):
    """The output head: logits, or with targets the loss of each token, which need not keep the logits.

    In one module so that whoever gathers its weight around a call, as sharding does, sees that call. With
    ``counts_B`` only the logits of position ``counts_B - 1`` of each row, [B, 1, V]. With ``scored`` the loss of each
    of its targets and whether it is the likeliest token, 0 or 1: [2, N] in fp32. With ``likeliest`` the ids and
    log-probabilities of that many tokens, [2, B, S, K] in fp32, which holds the ids of any vocabulary exactly.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, config.padded_vocab_size, bias=False)
        self.head_config = HeadConfig(config.vocab_size or 0, config.final_logit_softcapping or 0.0, config.z_loss)
        self.compute_logits: Logits = compute_logits

    def forward(
        self,
        x_BSD: Tensor,
        targets_BS: Tensor | None = None,
        counts_B: Tensor | None = None,
        scored: ScoredTargets | None = None,
        *,
        with_z_loss: bool = False,
        soft: SoftTargets | None = None,
        likeliest: int = 0,
    ) -> Tensor:
        if likeliest:
            return self._likeliest(x_BSD.flatten(0, 1), likeliest).view(2, *x_BSD.shape[:2], likeliest)
        if scored is not None:
            return self._score(x_BSD[scored.rows_N, scored.positions_N], scored.targets_N)
        if counts_B is not None:
            x_BSD = x_BSD[torch.arange(len(x_BSD), device=x_BSD.device), counts_B - 1][:, None]
        if targets_BS is None:
            return self.compute_logits(x_BSD, self.weight, self.head_config)
        head_config = self.head_config if with_z_loss else self.head_config._replace(z_loss=0.0)
        losses = self.ops.cross_entropy(x_BSD.flatten(0, 1), self.weight, targets_BS.flatten(), head_config)
        if soft is not None:
            losses = self._with_teacher(losses, x_BSD.flatten(0, 1), targets_BS.flatten(), soft)
        return losses.view_as(targets_BS)

    def _with_teacher(self, losses: Tensor, x_ND: Tensor, targets_N: Tensor, soft: SoftTargets) -> Tensor:
        """The values stay the losses of the right tokens; the gradient also has the distance to a teacher."""
        rows = targets_N != IGNORE_INDEX
        ids, logps = soft.ids_BSK.flatten(0, 1)[rows], soft.logps_BSK.flatten(0, 1)[rows]
        distances = soft_cross_entropy(x_ND[rows], self.weight, ids, logps, self.head_config)
        distance_N = torch.zeros_like(losses).masked_scatter(rows, distances)
        mixed = (1 - soft.weight) * losses + soft.weight * distance_N
        return losses.detach() + (mixed - mixed.detach())

    def _likeliest(self, x_ND: Tensor, count: int) -> Tensor:
        """A few rows of logits at a time."""
        parts = [torch.zeros(2, 0, count, device=x_ND.device)]
        for x in torch.split(x_ND, chunk_rows(len(self.weight), x_ND.device)):
            ids, logps = likeliest_tokens(self.compute_logits(x, self.weight, self.head_config), count)
            parts.append(torch.stack([ids.float(), logps]))
        return torch.cat(parts, dim=1)

    def _score(self, x_ND: Tensor, targets_N: Tensor) -> Tensor:
        rows = chunk_rows(len(self.weight), x_ND.device)
        parts = [torch.zeros(2, 0, device=x_ND.device)]
        for x, targets in zip(torch.split(x_ND, rows), torch.split(targets_N, rows), strict=True):
            logits = self.compute_logits(x, self.weight, self.head_config).float()
            losses = nn.functional.cross_entropy(logits, targets, reduction="none")
            parts.append(torch.stack([losses, (logits.argmax(-1) == targets).float()]))
        return torch.cat(parts, dim=1)
