"""Context parallel: every rank has some positions of each sequence, and attention brings them together.

``gather``: a rank takes one piece from the front and one from the back, so that all have as much to see, and gathers
the keys and values of all (https://arxiv.org/abs/2407.21783). ``ulysses``: ranks exchange positions for heads, so that
each attends over all positions by whatever form was chosen (https://arxiv.org/abs/2309.14509).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero2all.model import Z2all
from zero2all.model.blocks import Attention
from zero2all.model.ops.attention import AttentionForm, visible
from zero2all.recipe import ParallelRecipe


class Context:
    """Which positions are whose."""

    def __init__(self, mesh: DeviceMesh, recipe: ParallelRecipe) -> None:
        self.group, self.rank, self.size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.ulysses = recipe.cp_attention == "ulysses"

    def positions(self, rank: int, length: int) -> Tensor:
        """A rank's positions in sequences of ``length``."""
        places = torch.arange(length)
        if self.ulysses:
            return places.chunk(self.size)[rank]
        pieces = places.chunk(2 * self.size)
        return torch.cat([pieces[rank], pieces[-1 - rank]])

    def own(self, length: int, device: torch.device) -> Tensor:
        return self.positions(self.rank, length).to(device)

    def apply(self, model: Z2all) -> None:
        """Make a model that sees a rank's positions compute what it would with all of them.

        It is given the tokens and targets of those positions, and ``starts_BS`` of all.
        """
        table = model.rotary

        def rotary(start: int, length: int, starts_BS: Tensor | None) -> Tensor:
            whole = length * self.size
            return table(start, whole, starts_BS).index_select(-2, self.own(whole, model.rotary_2SE.device))

        model.rotary = rotary  # type: ignore[method-assign]
        for module in (model, *(part for part in model.modules() if isinstance(part, Attention))):
            module.ops = copy.copy(module.ops)
            module.ops.attention = self._form(module.ops.attention)

    def _form(self, inner: AttentionForm) -> AttentionForm:
        def plan_gathered(starts_BS: Tensor | None, length: int, window: int | None, device: torch.device) -> Tensor:
            whole = length * self.size
            gathered = torch.cat([self.positions(rank, whole) for rank in range(self.size)]).to(device)
            seen = visible(starts_BS, whole, window, device)
            return seen[:, :, self.own(whole, device)][..., gathered]

        def attend_gathered(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
            k, v = (collectives.all_gather_single_autograd(x.contiguous(), 2, self.group) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])

        def plan_exchanged(starts_BS: Tensor | None, length: int, window: int | None, device: torch.device) -> Any:
            return inner.plan(starts_BS, length * self.size, window, device)

        def attend_exchanged(q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
            q, k, v = (self._exchange(x, 1, 2) for x in (q, k, v))
            return self._exchange(inner.attend(q, k, v, plan), 2, 1)

        if self.ulysses:
            return AttentionForm(plan_exchanged, attend_exchanged)
        return AttentionForm(plan_gathered, attend_gathered)

    def _exchange(self, x_BHSE: Tensor, cut: int, join: int) -> Tensor:
        """Cut a dimension over the ranks and join another that was cut: heads (1) and positions (2)."""
        pieces = torch.stack(x_BHSE.chunk(self.size, dim=cut))
        pieces = collectives.all_to_all_single_autograd(pieces.contiguous(), None, None, self.group)
        return torch.cat(list(pieces.unbind()), dim=join)
