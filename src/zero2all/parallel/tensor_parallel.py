"""Tensor parallel: each matrix of a block is sharded over ranks (https://arxiv.org/abs/1909.08053).

With ``sp`` the residual stream and the norms are sharded along the sequence (https://arxiv.org/abs/2205.05198).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from zero2all.base.errors import UsageError
from zero2all.base.torch_private import enable_micro_pipeline_tp, foreach_copy_
from zero2all.model import IGNORE_INDEX, Z2all
from zero2all.model.blocks import LMHead, RMSNorm
from zero2all.model.ops.cross_entropy import CrossEntropy, HeadConfig, Logits, compute_logits
from zero2all.model.ops.norm import Norm
from zero2all.parallel.sharded_init import to_local
from zero2all.recipe import ParallelRecipe


def apply_tp(model: Z2all, mesh: DeviceMesh, recipe: ParallelRecipe) -> None:
    """Shard a model, or a pipeline stage of one, over the tp ranks. It may be on the meta device."""
    stream: Placement = Shard(1) if recipe.sp else Replicate()
    for module in model.modules():
        if isinstance(module, RMSNorm):  # replicated, but a DTensor: optimizers need one kind of tensor
            _distribute_parameters(module, mesh, Replicate())
    for block in model.layers.children():
        parallelize_module(
            block,
            mesh,
            {
                **{f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
                **{f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")},
                "self_attn.o_proj": RowwiseParallel(output_layouts=stream),
                "mlp.down_proj": RowwiseParallel(output_layouts=stream),
            },
        )
        if recipe.sp:
            for name in ("self_attn", "mlp"):
                block.get_submodule(name).register_forward_pre_hook(_gather_input_hook(mesh, stream))
    if isinstance(model.embed_tokens, nn.Embedding):
        _distribute_parameters(model.embed_tokens, mesh, Shard(0))
        model.embed_tokens.forward = _vocab_parallel_lookup(model.embed_tokens, mesh, stream)  # type: ignore[assignment]
        # The sum above may still be under way, and a compiled block would take its gradient for zero.
        model.embed_tokens.register_forward_hook(lambda module, inputs, output: torch.mul(output, 1))
    if isinstance(model.lm_head, LMHead):
        _distribute_parameters(model.lm_head, mesh, Shard(0))
        model.lm_head.register_forward_pre_hook(_gather_input_hook(mesh, stream, gradient=Partial()))
        if model.config.tie_word_embeddings:
            model.lm_head.weight = model.embed_tokens.weight


def apply_tp_ops(model: Z2all, mesh: DeviceMesh) -> None:
    """Norms and loss over what a rank holds, with the chosen kernels."""
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.ops = copy.copy(module.ops)
            module.ops.norm = _local_norm(module.ops.norm)
    if isinstance(model.lm_head, LMHead):
        ops = model.lm_head.ops = copy.copy(model.lm_head.ops)
        ops.cross_entropy = _vocab_parallel_loss(mesh)
        model.lm_head.compute_logits = _gathered_logits(mesh)


def _distribute_parameters(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [placement])))


def _gather_input_hook(
    mesh: DeviceMesh, stream: Placement, gradient: Placement | None = None
) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Before a module: gather the positions of its first input. With ``gradient`` it becomes a plain tensor whose
    gradient comes back with that placement."""

    def gather(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        full = DTensor.from_local(inputs[0], mesh, [stream], run_check=False).redistribute(placements=[Replicate()])
        first = full if gradient is None else full.to_local(grad_placements=[gradient])
        return first, *inputs[1:]

    return gather


def _vocab_parallel_lookup(embedding: nn.Embedding, mesh: DeviceMesh, stream: Placement) -> Callable[[Tensor], Tensor]:
    """Every rank looks up the tokens of its rows. torch's RowwiseParallel does the same, but its gradient has all rows
    on every rank, which zero 1 would keep over the micro-batches."""

    def lookup(tokens_BS: Tensor) -> Tensor:
        assert isinstance(embedding.weight, DTensor)
        own = embedding.weight.to_local()
        first = mesh.get_local_rank() * own.shape[0]
        mine = (tokens_BS >= first) & (tokens_BS < first + own.shape[0])
        rows = F.embedding(torch.where(mine, tokens_BS - first, 0), own)
        part = torch.where(mine[..., None], rows, 0.0)
        return DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(placements=[stream]).to_local()

    return lookup


def _local_norm(norm: Norm) -> Norm:
    """The gradient of a rank's part of the input: see ``reduce_norm_gradients``."""

    def local(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert isinstance(weight, DTensor)
        return norm(x, weight.to_local(), eps)

    return local


def norms_in_parts(model: nn.Module, recipe: ParallelRecipe) -> list[Tensor]:
    """The weights of norms that see a part of their input on each tp rank.

    The norms of queries and keys see a rank's heads, norms of the stream its positions or all of them.
    """
    return [
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, RMSNorm) and (recipe.sp or name.endswith(("q_norm", "k_norm")))
    ]


def reduce_norm_gradients(weights: Sequence[Tensor], earlier: Sequence[Tensor | None], mesh: DeviceMesh) -> None:
    """Sum the gradients of ``norms_in_parts`` over the tp ranks, and add the ``earlier`` ones. One all-reduce.

    As partial placements they would be reduced one by one, by FSDP even in every micro-batch. A sum over the data
    parallel ranks and one over the tp ranks can be taken in any order, so this one waits for all of them.
    """
    shards = [to_local(weight.grad) for weight in weights if weight.grad is not None]
    if not shards:
        return
    total = torch.cat([shard.flatten() for shard in shards])
    total = total.to(mesh.device_type, torch.float32)  # offloaded ones are on the CPU
    dist.all_reduce(total, group=mesh.get_group())
    sums = torch.split(total.to(shards[0].device), [shard.numel() for shard in shards])
    foreach_copy_(shards, [part.view_as(shard) for part, shard in zip(sums, shards, strict=True)])
    for weight, before in zip(weights, earlier, strict=True):
        if before is not None:
            assert weight.grad is not None
            weight.grad += before


def enable_async_tp(mesh: DeviceMesh, device: torch.device, *, compile: bool) -> None:
    """Let the compiler split the matrix products around all-gathers and reduce-scatters, so that the two overlap."""
    if device.type != "cuda" or not compile:
        missing = "a GPU with CUDA" if device.type != "cuda" else "torch.compile"
        raise UsageError(
            f"parallel.async_tp needs {missing}: set parallel.async_tp=false"
            + ("" if device.type != "cuda" else " or train.compile=true")
        )
    enable_micro_pipeline_tp(mesh.get_group())


def _gathered_logits(mesh: DeviceMesh) -> Logits:
    """Every rank computes the logits of its rows of the vocabulary and gets all of them. No gradient."""
    group = mesh.get_group()

    def logits(x_BSD: Tensor, weight: Tensor, head: HeadConfig) -> Tensor:
        assert isinstance(weight, DTensor)
        own = weight.to_local()
        part = compute_logits(x_BSD, own, head._replace(vocab_size=len(own))).contiguous()
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, dim=-1)[..., : head.vocab_size]

    return logits


def _vocab_parallel_loss(mesh: DeviceMesh) -> CrossEntropy:
    """Every rank has the logits of its rows of the vocabulary; three numbers a token are all-reduced."""
    group, rank = mesh.get_group(), mesh.get_local_rank()

    def loss(x_ND: Tensor, weight: Tensor, targets_N: Tensor, head: HeadConfig) -> Tensor:
        assert isinstance(weight, DTensor)
        own = weight.to_local()
        first = rank * own.shape[0]
        logits = F.linear(x_ND, own.to(x_ND.dtype)).float()
        if head.softcap:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        rows = torch.arange(first, first + own.shape[0], device=logits.device)
        logits = logits.masked_fill(rows >= head.vocab_size, float("-inf"))
        # The largest logit over all ranks, so that no exponential overflows; rows of padding alone have none.
        peak = logits.detach().amax(-1)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group)
        total = _all_reduce_sum((logits - peak[:, None]).exp().sum(-1), group).log() + peak
        mine = (targets_N >= first) & (targets_N < first + own.shape[0])
        place = torch.where(mine, targets_N - first, 0)
        right = _all_reduce_sum(torch.where(mine, logits.gather(-1, place[:, None])[:, 0], 0.0), group)
        losses = total - right
        if head.z_loss:
            extra = head.z_loss * total.square()
            losses = losses + (extra - extra.detach())
        return torch.where(targets_N == IGNORE_INDEX, 0.0, losses)

    return loss


class _AllReduceSum(torch.autograd.Function):
    """All-reduce. Every rank continues with the same sum, so every summand gets its gradient."""

    @staticmethod
    def forward(context: object, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _all_reduce_sum(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    total: Tensor = _AllReduceSum.apply(part, group)  # type: ignore[no-untyped-call]
    return total
