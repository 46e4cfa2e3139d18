"""The feed-forward parts of a mixture of experts, over tokens that are sorted by their expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.model.ops.forms import plain
from zero2all.model.ops.swiglu import SwiGLU

# x [N, D] sorted by expert, counts [E], gate and up [E, I, D], down [E, D, I], swiglu
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, SwiGLU], Tensor]


def reference(x_ND: Tensor, counts_E: Tensor, gate: Tensor, up: Tensor, down: Tensor, swiglu: SwiGLU) -> Tensor:
    """One expert after another."""
    parts = torch.split(x_ND, counts_E.tolist())
    matrices = zip(parts, gate.unbind(), up.unbind(), down.unbind(), strict=True)
    return torch.cat([F.linear(swiglu(F.linear(x, g), F.linear(x, u)), d) for x, g, u, d in matrices])


def grouped(x_ND: Tensor, counts_E: Tensor, gate: Tensor, up: Tensor, down: Tensor, swiglu: SwiGLU) -> Tensor:
    """All experts in one call a matrix, the counts never leaving the device."""
    ends = counts_E.cumsum(0).to(torch.int32)

    def each(x: Tensor, weight: Tensor) -> Tensor:
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)

    return each(swiglu(each(x_ND, gate), each(x_ND, up)), down)


FORMS = {"grouped": plain(grouped), "reference": plain(reference)}
