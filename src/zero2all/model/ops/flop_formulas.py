"""What torch's FlopCounterMode counts for our own operations, which it cannot look into."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from zero2all.model.ops import chunked_loss, document_attention, experts  # noqa: F401 - which define the operations

Shape = tuple[int, ...]
ours: Any = torch.ops.zero2all


@register_flop_formula(ours.document_attention)
def _(q: Shape, k: Shape, v: Shape, *rest: Any, **more: Any) -> int:
    """Two products over every pair of the row, as for masked attention elsewhere; backward five."""
    return 2 * 2 * math.prod(q) * k[2]


@register_flop_formula(ours.document_attention_backward)
def _(grad: Shape, q: Shape, k: Shape, v: Shape, *rest: Any, **more: Any) -> int:
    return 5 * 2 * math.prod(q) * k[2]


@register_flop_formula(ours.expert_product)
def _(x_ND: Shape, weight_EID: Shape, *rest: Any, **more: Any) -> int:
    return 2 * x_ND[0] * weight_EID[1] * weight_EID[2]


@register_flop_formula(ours.expert_weight_gradient)
def _(grad_NI: Shape, x_ND: Shape, *rest: Any, **more: Any) -> int:
    return 2 * x_ND[0] * grad_NI[1] * x_ND[1]


@register_flop_formula(ours.chunked_loss)
def _(x: Shape, weight: Shape, *rest: Any, **more: Any) -> int:
    """One product, and with the gradient three."""
    products = 3 if rest[-1] else 1
    return products * 2 * x[0] * weight[0] * weight[1]


@register_flop_formula(ours.chunked_loss_backward)
def _(grad: Shape, x: Shape, weight: Shape, *rest: Any, **more: Any) -> int:
    return 3 * 2 * x[0] * weight[0] * weight[1]
