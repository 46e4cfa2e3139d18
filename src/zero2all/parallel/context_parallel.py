"""Context parallel: every rank has some positions of each sequence, and attention sees all of them.

``allgather``: a rank takes one chunk from the front and one from the back, which balances the causal mask, and
all-gathers keys and values (https://arxiv.org/abs/2407.21783). ``ulysses``: an all-to-all exchanges positions for
heads, so that each rank attends over all positions with the chosen kernel (https://arxiv.org/abs/2309.14509).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero2all.model import Z2all
from zero2all.model.blocks import Attention
from zero2all.model.ops.attention import AttentionBackend, attention_mask
from zero2all.recipe import ParallelRecipe
from zero2all.torch_private import all_gather_autograd, all_to_all_autograd


class ContextParallel:
    """Which positions each rank has."""

    def __init__(self, mesh: DeviceMesh, recipe: ParallelRecipe) -> None:
        self.group, self.rank, self.size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.ulysses = recipe.cp_attention == "ulysses"

    def positions(self, rank: int, length: int) -> Tensor:
        """A rank's positions in sequences of ``length``."""
        positions = torch.arange(length)
        if self.ulysses:
            return positions.chunk(self.size)[rank]
        chunks = positions.chunk(2 * self.size)
        return torch.cat([chunks[rank], chunks[-1 - rank]])

    def local_positions(self, length: int, device: torch.device) -> Tensor:
        return self.positions(self.rank, length).to(device)

    def apply(self, model: Z2all) -> None:
        """Make a model that sees a rank's positions compute what it would with all of them.

        It is given the tokens and targets of those positions, and ``doc_starts_BS`` of all.
        """
        table = model.rotary

        def rotary(length: int, doc_starts_BS: Tensor | None) -> Tensor:
            full_length = length * self.size
            return table(full_length, doc_starts_BS).index_select(
                -2, self.local_positions(full_length, model.rotary_2SE.device)
            )

        model.rotary = rotary  # type: ignore[method-assign]
        for module in (model, *(part for part in model.modules() if isinstance(part, Attention))):
            module.ops = copy.copy(module.ops)
            module.ops.attention = self._attention_backend(module.ops.attention)

    def _attention_backend(self, backend: AttentionBackend) -> AttentionBackend:
        def gathered_mask(
            doc_starts_BS: Tensor | None, length: int, window: int | None, device: torch.device
        ) -> Tensor:
            full_length = length * self.size
            gathered = torch.cat([self.positions(rank, full_length) for rank in range(self.size)]).to(device)
            seen = attention_mask(doc_starts_BS, full_length, window, device)
            return seen[:, :, self.local_positions(full_length, device)][..., gathered]

        def attend_gathered(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
            k, v = (all_gather_autograd(x.contiguous(), 2, self.group) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])

        def exchanged_mask(doc_starts_BS: Tensor | None, length: int, window: int | None, device: torch.device) -> Any:
            return backend.mask_for(doc_starts_BS, length * self.size, window, device)

        def attend_exchanged(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
            q, k, v = (self._all_to_all(x, 1, 2) for x in (q, k, v))
            return self._all_to_all(backend.attend(q, k, v, mask), 2, 1)

        if self.ulysses:
            return AttentionBackend(exchanged_mask, attend_exchanged)
        return AttentionBackend(gathered_mask, attend_gathered)

    def _all_to_all(self, x_BHSE: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        """Shard one dimension over the ranks and gather another: heads (1) and positions (2)."""
        chunks = torch.stack(x_BHSE.chunk(self.size, dim=split_dim))
        chunks = all_to_all_autograd(chunks.contiguous(), None, None, self.group)
        return torch.cat(list(chunks.unbind()), dim=concat_dim)
