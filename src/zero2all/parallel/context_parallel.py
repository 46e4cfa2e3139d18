"""Context parallel: every rank has some positions of each sequence, and attention sees all of them.

``allgather``: a rank takes one chunk from the front and one from the back, which balances the causal mask, and
all-gathers keys and values (https://arxiv.org/abs/2407.21783); each chunk attends to what comes before it, so that no
mask is needed. ``ring``: the same chunks, and keys and values pass from rank to rank (``ring_attention``); layers with
a window, which need few of them, gather. ``ulysses``: an all-to-all exchanges positions for heads, so that each rank
attends over all positions with the chosen kernel (https://arxiv.org/abs/2309.14509).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero2all.base.torch_private import all_gather_autograd, all_to_all_autograd
from zero2all.model import Z2all
from zero2all.model.blocks import Attention
from zero2all.model.ops.attention import AttentionBackend, MaskInputs, SdpaMask, attend_sdpa, sdpa_mask
from zero2all.model.ops.varlen import document_cu_seqlens
from zero2all.parallel.ring_attention import ring_attention
from zero2all.recipe import ParallelRecipe

GatheredMask = tuple[tuple[SdpaMask, int], ...]
"""What a rank's front and back chunk see of all keys, and where the keys of each end."""


class ContextParallel:
    """Which positions each rank has."""

    def __init__(self, mesh: DeviceMesh, recipe: ParallelRecipe) -> None:
        self.group, self.rank, self.size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.kind = recipe.cp_attention
        self._positions: dict[tuple[int, torch.device], Tensor] = {}

    def positions(self, rank: int, length: int) -> Tensor:
        """A rank's positions in sequences of ``length``."""
        positions = torch.arange(length)
        if self.kind == "ulysses":
            return positions.chunk(self.size)[rank]
        chunks = positions.chunk(2 * self.size)
        return torch.cat([chunks[rank], chunks[-1 - rank]])

    def local_positions(self, length: int, device: torch.device) -> Tensor:
        if (length, device) not in self._positions:  # once: a copy to the device is a host sync
            self._positions[length, device] = self.positions(self.rank, length).to(device)
        return self._positions[length, device]

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
        model.balance_inputs = self._balance_inputs  # type: ignore[method-assign]
        for module in (model, *(part for part in model.modules() if isinstance(part, Attention))):
            module.ops = copy.copy(module.ops)
            module.ops.attention = self._attention_backend(module.ops.attention)

    def _balance_inputs(self, counts_LE: Tensor, wanted_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Experts' tokens of whole rows. Every rank has as many positions, and so the same part of the mean score: each
        counts as often as the others, though one may have more targets."""
        total = torch.cat([counts_LE.flatten(), wanted_BS.sum().view(1)])
        dist.all_reduce(total, group=self.group)
        weight = total[-1] / (self.size * wanted_BS.numel())
        return total[:-1].view_as(counts_LE), weight.expand(wanted_BS.shape)

    def _attention_backend(self, backend: AttentionBackend) -> AttentionBackend:
        def exchanged_mask(rows: MaskInputs) -> Any:
            return backend.mask_for(rows._replace(length=rows.length * self.size))

        def attend_exchanged(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
            q, k, v = (self._all_to_all(x, 1, 2) for x in (q, k, v))
            return self._all_to_all(backend.attend(q, k, v, mask), 2, 1)

        if self.kind == "ulysses":
            return AttentionBackend(exchanged_mask, attend_exchanged)
        return AttentionBackend(self._chunk_mask, self._attend_chunks)

    def _chunk_mask(self, rows: MaskInputs) -> GatheredMask | MaskInputs:
        """``length`` counts this rank's positions, documents are given for whole rows. A ring needs no more."""
        doc_starts_BS, length, window, device, cu_seqlens = rows
        if doc_starts_BS is not None and cu_seqlens is None and device.type == "cuda":
            cu_seqlens = document_cu_seqlens(doc_starts_BS)
        if self.kind == "ring" and (window is None or window >= length * self.size):
            return rows._replace(cu_seqlens=cu_seqlens)
        chunk = length // 2
        ends = [(index + 1) * chunk for index in (self.rank, 2 * self.size - 1 - self.rank)]
        masks = []
        for end in ends:
            own_starts = None if doc_starts_BS is None else doc_starts_BS[:, end - chunk : end]
            queries = MaskInputs(own_starts, chunk, window, device, cu_seqlens)
            masks.append((sdpa_mask(queries, first=end - chunk, row_length=length * self.size), end))
        return tuple(masks)

    def _attend_chunks(self, q: Tensor, k: Tensor, v: Tensor, mask: GatheredMask | MaskInputs) -> Tensor:
        if isinstance(mask, MaskInputs):
            return ring_attention(q, k, v, mask.doc_starts_BS, mask.cu_seqlens, self.group)
        k, v = (self._gather(x) for x in (k, v))
        chunks = zip(q.chunk(2, dim=2), mask, strict=True)
        return torch.cat([attend_sdpa(part, k[:, :, :end], v[:, :, :end], own) for part, (own, end) in chunks], dim=2)

    def _gather(self, x_BKSE: Tensor) -> Tensor:
        """All positions, in their order."""
        chunks = all_gather_autograd(x_BKSE.contiguous(), 2, self.group).chunk(2 * self.size, dim=2)
        return torch.cat([*chunks[::2], *reversed(chunks[1::2])], dim=2)

    def _all_to_all(self, x_BHSE: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        """Shard one dimension over the ranks and gather another: heads (1) and positions (2)."""
        chunks = torch.stack(x_BHSE.chunk(self.size, dim=split_dim))
        chunks = all_to_all_autograd(chunks.contiguous(), None, None, self.group)
        return torch.cat(list(chunks.unbind()), dim=concat_dim)
