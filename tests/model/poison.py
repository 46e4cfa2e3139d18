"""Stands for the grouped product of a GPU where it is at its worst: what it does not compute is not a number."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from zero2all.model.ops import experts


def grouped_mm(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
    """Rows by group ([N, K] x [E, K, M]), or inner dimension by group ([K, N] x [N, M]), as F.grouped_mm."""
    assert left.numel(), "the kernel was called with an empty matrix"
    assert right.numel(), "the kernel was called with an empty matrix"
    groups = [slice(begin, end) for begin, end in pairwise([0, *offs.tolist()])]
    by_rows = right.dim() == 3
    shape = (left.shape[0], right.shape[2]) if by_rows else (len(groups), left.shape[0], right.shape[1])
    out = left.new_full(shape, float("nan"))
    for number, group in enumerate(groups):
        if group.start == group.stop:
            continue
        if by_rows:
            out[group] = left[group] @ right[number]
        else:
            out[number] = left[:, group] @ right[group]
    return out


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_has_grouped_mm_kernel", lambda x: True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm)
