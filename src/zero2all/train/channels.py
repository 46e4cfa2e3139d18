"""Losses by source, from the losses of the tokens, in the one reduction that the loss needs anyway."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LOSS, TARGETS, TEXT_LOSS, BYTES = range(4)  # columns: nats and targets of all tokens, nats and bytes of text alone


class Channels:
    """
    >>> channels = Channels(["code", "en", "zh"], tokenizer.text_bytes, device)
    >>> *by_source, empty = channels.sums(losses, targets, batch.sources).tolist()  # after adding up over ranks
    >>> channels.figures(by_source)
    {'loss/en': 2.31, 'bpb/en': 1.07, ...}
    """

    def __init__(self, names: Sequence[str], text_bytes: Sequence[int], device: torch.device) -> None:
        self.names = list(names)
        self._number = {name: number for number, name in enumerate(self.names)}
        # One more entry at the end, where a target that counts for nothing points to.
        self._bytes = torch.tensor([*text_bytes, 0], dtype=torch.float64, device=device)

    def sums(self, losses_NS: Tensor, targets_NS: Tensor, sources: Sequence[str]) -> Tensor:
        """[sources + 1, 4] in fp64, of losses and targets on the same device. A row without a source is padding.

        The last line is empty, for what ranks wish to tell each other: it travels with what is sent anyway.
        """
        device = losses_NS.device
        rows = [row for row, source in enumerate(sources) if source in self._number]
        numbers = torch.tensor([self._number[sources[row]] for row in rows], dtype=torch.int64).to(device)
        losses, targets = losses_NS[rows].double(), targets_NS[rows]
        sizes = self._bytes[targets.clamp(min=-1)]
        of_row = torch.stack(
            [losses.sum(1), (targets >= 0).sum(1).double(), (losses * (sizes > 0)).sum(1), sizes.sum(1)], dim=1
        )
        return torch.zeros(len(self.names) + 1, 4, dtype=torch.float64, device=device).index_add_(0, numbers, of_row)

    def figures(self, sums: list[list[float]]) -> dict[str, float]:
        """Loss and bits per byte of every source that was in the batch."""
        figures = {}
        for name, row in zip(self.names, sums, strict=True):
            if row[TARGETS]:
                figures[f"loss/{name}"] = row[LOSS] / row[TARGETS]
            if row[BYTES]:
                figures[f"bpb/{name}"] = row[TEXT_LOSS] / math.log(2) / row[BYTES]
        return figures
