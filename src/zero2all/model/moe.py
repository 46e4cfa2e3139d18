"""A mixture of experts: each token goes to the few that its router scores highest, and none is dropped.

Shapes: N tokens, D hidden, E experts, T experts of a token, I width of an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero2all.model.blocks import FeedForward, OpsModule
from zero2all.recipe import MoeConfig


class GroupedExperts(OpsModule):
    """The weights of all experts, applied to tokens that are sorted by expert.

    It knows nothing of routing, so that expert parallelism only has to move the tokens.
    """

    def __init__(self, config: MoeConfig, hidden: int) -> None:
        super().__init__()
        count, width = config.num_experts, config.moe_intermediate_size
        self.gate_proj = nn.Parameter(torch.empty(count, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(count, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, width))

    def forward(self, x_ND: Tensor, counts_E: Tensor) -> Tensor:
        gate, up, down = (weight.to(x_ND.dtype) for weight in (self.gate_proj, self.up_proj, self.down_proj))
        return self.ops.experts(x_ND, counts_E, gate, up, down, self.ops.swiglu)


class Router(nn.Linear):
    """Scores of all experts for each token, in fp32 whatever the weights and tokens are: a near tie must not turn on
    rounding. A module of its own, called as one, so that sharding can gather its weight in fp32."""

    def forward(self, x_ND: Tensor) -> Tensor:
        with torch.autocast(x_ND.device.type, enabled=False):
            return F.linear(x_ND.float(), self.weight.float())


class RoutingStats(NamedTuple):
    """Routing statistics of one pass in training.

    An output like any other, never kept by the module: activation checkpointing runs a module twice, and what the
    second run kept would hold its full graph and count every token again.
    """

    counts_E: Tensor
    """Tokens of each expert."""
    mean_score_E: Tensor | None
    """With ``load_balancing: aux``: the share of each expert in the scores, averaged over the tokens."""


class MoE(nn.Module):
    """``load`` counts the tokens of each expert since the last call of ``update_expert_bias``."""

    bias: Tensor
    load: Tensor

    def __init__(self, config: MoeConfig, hidden: int) -> None:
        super().__init__()
        self.config = config
        self.gate = Router(hidden, config.num_experts, bias=False)
        self.experts = GroupedExperts(config, hidden)
        shared = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = FeedForward(hidden, shared) if shared else None
        if config.load_balancing == "bias":
            self.register_buffer("bias", torch.zeros(config.num_experts))
        self.register_buffer("load", torch.zeros(config.num_experts), persistent=False)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, RoutingStats | None]:
        """The tokens as their experts changed them; in training also the routing statistics."""
        x_ND = x_BSD.flatten(0, 1)
        scores_NE, weights_NT, experts_NT = self._route(x_ND)
        flat = experts_NT.flatten()
        order = flat.argsort(stable=True)
        # Not bincount, which is a host sync.
        experts_E = torch.arange(self.config.num_experts + 1, device=flat.device)
        counts_E = torch.searchsorted(flat[order], experts_E).diff()
        out = self.experts(x_ND[order // self.config.num_experts_per_tok], counts_E)
        # Before the experts' output is used: under ep its all-to-all is still under way.
        shared_ND = None if self.shared_experts is None else self.shared_experts(x_ND)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        out_NTD = out[back].view(*weights_NT.shape, -1)
        out_ND = torch.einsum("ntd,nt->nd", out_NTD, weights_NT.to(out.dtype))
        if shared_ND is not None:
            out_ND = out_ND + shared_ND
        routed = RoutingStats(counts_E, self._mean_score(scores_NE)) if self.training else None
        return out_ND.view_as(x_BSD), routed

    def _route(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All scores, weights and numbers of each token's experts."""
        logits_NE = self.gate(x_ND)
        scores_NE = logits_NE.softmax(-1) if self.config.scoring_func == "softmax" else logits_NE.sigmoid()
        wanted_NE = scores_NE + self.bias if self.config.load_balancing == "bias" else scores_NE
        experts_NT = wanted_NE.topk(self.config.num_experts_per_tok, dim=-1).indices
        weights_NT = scores_NE.gather(-1, experts_NT)
        if self.config.norm_topk_prob:
            weights_NT = weights_NT / weights_NT.sum(-1, keepdim=True)
        return scores_NE, weights_NT, experts_NT

    def _mean_score(self, scores_NE: Tensor) -> Tensor | None:
        return (scores_NE / scores_NE.sum(-1, keepdim=True)).mean(0) if self.config.load_balancing == "aux" else None

    @torch.no_grad()
    def update_expert_bias(self) -> None:
        """Once per step: experts with less than their share become a little likelier (https://arxiv.org/abs/2408.15664)."""
        if self.config.load_balancing == "bias":
            self.bias += self.config.bias_update_rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


def balance_loss(counts_E: Tensor, mean_score_E: Tensor) -> Tensor:
    """Share of tokens times mean score, by expert (https://arxiv.org/abs/2101.03961): 1 where every expert has the same
    load, else more."""
    share_E = counts_E.float() / counts_E.sum()
    return len(counts_E) * (share_E * mean_score_E).sum()
