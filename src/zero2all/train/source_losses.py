"""Losses by source, in the same all-reduce that the loss needs anyway."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zero2all.hardware import copy_to_device, fp64_device

LOSS, TARGETS, TEXT_LOSS, BYTES = range(4)  # columns: nats and targets of all tokens, nats and bytes of text alone


class SourceLosses:
    """
    >>> source_losses = SourceLosses(["code", "en", "zh"], tokenizer.token_byte_lengths, device)
    >>> *by_source, empty = source_losses.sums(losses, targets, batch.sources).tolist()  # after an all-reduce
    >>> source_losses.metrics(by_source)
    {'loss/en': 2.31, 'bpb/en': 1.07, ...}
    """

    def __init__(self, names: Sequence[str], token_byte_lengths: Sequence[int], device: torch.device) -> None:
        self.names = list(names)
        self._source_index = {name: number for number, name in enumerate(self.names)}
        # One more entry at the end, for ignored targets (index -1).
        self._bytes = torch.tensor([*token_byte_lengths, 0], dtype=torch.float64, device=fp64_device(device))

    def sums(self, losses_NS: Tensor, targets_NS: Tensor, sources: Sequence[str]) -> Tensor:
        """[sources + 1, 4] in fp64, of losses and targets on the same device. A row without a source is padding.

        The last row is zero: flags that ranks exchange go there, so that they need no all-reduce of their own.
        """
        losses, targets = (tensor.to(fp64_device(tensor.device)) for tensor in (losses_NS, targets_NS))
        padding = len(self.names) + 1  # a row of sums that is dropped
        numbers = torch.tensor([self._source_index.get(source, padding) for source in sources], dtype=torch.int64)
        losses, numbers = losses.double(), copy_to_device(numbers, losses.device)
        sizes = self._bytes[targets.clamp(min=-1)]
        row_sums = torch.stack(
            [losses.sum(1), (targets >= 0).sum(1).double(), (losses * (sizes > 0)).sum(1), sizes.sum(1)], dim=1
        )
        sums = torch.zeros(padding + 1, 4, dtype=torch.float64, device=losses.device)
        return sums.index_add_(0, numbers, row_sums)[:-1]

    def metrics(self, sums: Sequence[Sequence[float]]) -> dict[str, float]:
        """Loss and bits per byte of every source that was in the batch."""
        metrics = {}
        for name, row in zip(self.names, sums, strict=True):
            if row[TARGETS]:
                metrics[f"loss/{name}"] = row[LOSS] / row[TARGETS]
            if row[BYTES]:
                metrics[f"bpb/{name}"] = row[TEXT_LOSS] / math.log(2) / row[BYTES]
        return metrics
