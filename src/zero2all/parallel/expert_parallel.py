"""Expert parallel: ranks hold different experts of every MoE layer and exchange tokens by all-to-all."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from zero2all.base.torch_private import all_to_all_autograd
from zero2all.model import Z2all
from zero2all.model.moe import GroupedExperts


def expert_modules(model: nn.Module) -> list[GroupedExperts]:
    return [module for module in model.modules() if isinstance(module, GroupedExperts)]


def apply_ep(model: Z2all, mesh: DeviceMesh) -> None:
    """Give each rank its experts. The model may be on the meta device."""
    for experts in expert_modules(model):
        for name, parameter in list(experts.named_parameters()):
            experts.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
        experts.forward = functools.partial(_expert_parallel_forward, experts, mesh.get_group())  # type: ignore[method-assign]


def _expert_parallel_forward(
    experts: GroupedExperts, group: dist.ProcessGroup, x_ND: Tensor, counts_E: Tensor
) -> Tensor:
    """Dispatch tokens to their experts and combine the results. ``x_ND`` is sorted by expert, so by rank too."""
    ranks = group.size()
    received_counts = torch.empty_like(counts_E)
    dist.all_to_all_single(received_counts, counts_E.contiguous(), group=group)
    received_counts = received_counts.view(ranks, -1)  # tokens from each rank for each expert here
    # The one host sync of a layer: an all-to-all needs its sizes on the host.
    sent, received = torch.stack([counts_E.view(ranks, -1).sum(1), received_counts.sum(1)]).tolist()
    x = all_to_all_autograd(x_ND.contiguous(), received, sent, group)
    # They arrive sorted by rank and then by expert; the experts need them sorted by expert.
    here = (
        torch.arange(received_counts.shape[1], device=x.device)
        .repeat(ranks)
        .repeat_interleave(received_counts.flatten(), output_size=sum(received))
    )
    order = here.argsort(stable=True)
    weights = (experts.gate_proj, experts.up_proj, experts.down_proj)
    gate, up, down = (w.to_local().to(x.dtype) if isinstance(w, DTensor) else w.to(x.dtype) for w in weights)
    out = experts.ops.experts(x[order], received_counts.sum(0), gate, up, down, experts.ops.swiglu)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return all_to_all_autograd(out[back].contiguous(), sent, received, group)
