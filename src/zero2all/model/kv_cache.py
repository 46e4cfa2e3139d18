"""The KV cache of generation."""

from __future__ import annotations

import torch
from torch import Tensor

from zero2all.model.ops.attention import cached_mask

DECODE_ROWS = 64  # sequences that generation decodes at a time


class KVCache:
    """Keys and values of several sequences, so that generation computes each position once.

    A row holds one sequence of up to ``max_length`` positions, and rows have lengths of their own. Each layer
    allocates its memory once, at its first forward pass: so a rank allocates only its own layers and heads.

    >>> cache = KVCache(rows=2, max_length=40, device=torch.device("cpu"))
    >>> logits = model(tokens, cache=cache)  # appends the tokens to both rows
    >>> cache.advance(tokens.shape[1])
    """

    def __init__(self, rows: int, max_length: int, device: torch.device) -> None:
        self.max_length = max_length
        self._lengths_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self._layers: dict[int, Tensor] = {}  # [2, R, L, K, E]
        self.select(0, rows)

    @property
    def lengths_B(self) -> Tensor:
        """Positions in use, of the selected rows."""
        return self._lengths_R[self._selected]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers.values())

    def select(self, first: int, last: int) -> None:
        """Use the rows [first, last) in the next forward passes."""
        self._selected = slice(first, last)
        self.longest = int(self.lengths_B.max()) if last > first else 0

    def clear(self) -> None:
        """Empty the selected rows."""
        self.lengths_B.zero_()
        self.longest = 0

    def next_positions(self, count: int) -> Tensor:
        """Where the next ``count`` tokens of each selected row are, [B, S]."""
        self._positions_BS = self.lengths_B[:, None] + torch.arange(count, device=self._lengths_R.device)
        return self._positions_BS

    def mask(self, window: int | None) -> Tensor:
        """Which positions the next tokens see, bool [B, 1, S, positions in use]. After ``next_positions``."""
        return cached_mask(self._positions_BS, self.longest + self._positions_BS.shape[1], window)

    def extend(self, layer: int, k_BKSE: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values at the next positions, and return them for all positions.

        Rows shorter than the longest have values of no meaning past their end, which a mask has to hide.
        """
        if layer not in self._layers:
            _, kv_heads, _, size = k_BKSE.shape
            shape = (2, len(self._lengths_R), self.max_length, kv_heads, size)
            # Zeros: what a mask hides is multiplied by 0, and 0 times a NaN would be one.
            self._layers[layer] = torch.zeros(shape, device=k_BKSE.device, dtype=k_BKSE.dtype)
        positions_BS = self._positions_BS
        rows_B1 = torch.arange(len(positions_BS), device=positions_BS.device)[:, None]
        keys, values = self._layers[layer][:, self._selected]
        keys[rows_B1, positions_BS], values[rows_B1, positions_BS] = k_BKSE.transpose(1, 2), v_BKSE.transpose(1, 2)
        end = self.longest + positions_BS.shape[1]
        return keys[:, :end].transpose(1, 2), values[:, :end].transpose(1, 2)

    def append(self, layer: int, k_BKE: Tensor, v_BKE: Tensor) -> tuple[Tensor, Tensor]:
        """``extend`` by one position of each row, for a layer that has memory."""
        stored, end = self._layers[layer][:, self._selected], self.longest + 1
        positions_B = self._positions_BS[:, 0]
        if len(positions_B) == 1:
            stored[0, 0, self.longest], stored[1, 0, self.longest] = k_BKE[0], v_BKE[0]
        else:
            rows_B = torch.arange(len(positions_B), device=positions_B.device)
            stored[0, rows_B, positions_B], stored[1, rows_B, positions_B] = k_BKE, v_BKE
        return stored[0, :, :end].transpose(1, 2), stored[1, :, :end].transpose(1, 2)

    def advance(self, count: int, counts_B: Tensor | None = None) -> None:
        """After a pass of ``count`` tokens: they are part of the sequence, or the first ``counts_B`` of them."""
        self.lengths_B.add_(count if counts_B is None else counts_B)
        self.longest += count

    def move(self, source: int, target: int) -> None:
        """Copy a row over another: the positions in use."""
        self._lengths_R[target] = self._lengths_R[source]
        length = int(self._lengths_R[source])
        for layer in self._layers.values():
            layer[:, target, :length] = layer[:, source, :length]


class Branches:
    """In place of a KV cache: each row is a text and several continuations of it, one after the other.

    A continuation sees the text and itself, at the positions that it would have if it followed the text alone. So the
    text is computed once. ``positions_BS`` are those positions; ``branches_BS`` is 0 in the text, and in the
    continuations the number of each.
    """

    longest = 0

    def __init__(self, positions_BS: Tensor, branches_BS: Tensor) -> None:
        self._positions_BS, self._branches_BS = positions_BS, branches_BS
        self.lengths_B = torch.zeros_like(positions_BS[:, 0])

    def next_positions(self, count: int) -> Tensor:
        """The positions, padded to ``count`` tokens."""
        padding = (0, count - self._positions_BS.shape[1])
        self._positions_BS = torch.nn.functional.pad(self._positions_BS, padding)
        self._branches_BS = torch.nn.functional.pad(self._branches_BS, padding)
        return self._positions_BS

    def mask(self, window: int | None) -> Tensor:
        """Which tokens of a row see which, bool [B, 1, S, S]."""
        places = torch.arange(self._positions_BS.shape[1], device=self._positions_BS.device)
        of_seen = self._branches_BS[:, None]
        mask = (places <= places[:, None]) & ((of_seen == 0) | (of_seen == self._branches_BS[:, :, None]))
        if window is not None:
            mask = mask & (self._positions_BS[:, :, None] - self._positions_BS[:, None] < window)
        return mask[:, None]

    def extend(self, layer: int, k_BKSE: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values are new."""
        return k_BKSE, v_BKSE
