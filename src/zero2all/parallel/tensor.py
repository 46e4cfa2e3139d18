"""Tensor parallel: each matrix of a block is cut over ranks (https://arxiv.org/abs/1909.08053).

With ``sp`` the residual stream and the norms are cut along the sequence (https://arxiv.org/abs/2205.05198).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from zero2all.model import Z2all


class Copied(ParallelStyle):
    """The same on every rank. Its parameters become DTensors too, so that optimizers meet one kind of tensor."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
            return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

        def leave(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)  # type: ignore[arg-type]


def apply_tensor_parallel(model: Z2all, mesh: DeviceMesh, sp: bool, loss_parallel: bool) -> None:
    """Lay a model, or a pipeline stage of one, over the tp ranks."""
    stream: Placement = Shard(1) if sp else Replicate()
    norm = SequenceParallel if sp else Copied
    if isinstance(model.embed_tokens, nn.Embedding):
        plan: dict[str, ParallelStyle] = {
            "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        }
        parallelize_module(model, mesh, plan)
        # The gather above may still be under way, and a compiled block would take its gradient for zero.
        model.embed_tokens.register_forward_hook(_arrive)
    for block in model.layers:
        parallelize_module(block, mesh, _block_plan(block, stream, norm))
    if isinstance(model.lm_head, nn.Linear):
        logits: Placement = Shard(-1) if loss_parallel else Replicate()
        head = ColwiseParallel(input_layouts=stream, output_layouts=logits, use_local_output=not loss_parallel)
        parallelize_module(model, mesh, {"norm": norm(), "lm_head": head})
    if model.config.tied:
        model.lm_head.weight = model.embed_tokens.weight


def _block_plan(block: nn.Module, stream: Placement, norm: type[ParallelStyle]) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": norm(),
        "post_attention_layernorm": norm(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=stream),
        "mlp.down_proj": RowwiseParallel(output_layouts=stream),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[name] = ColwiseParallel()
    if isinstance(stream, Shard):
        for name, inputs in (("self_attn", 3), ("mlp", 1)):
            rest: tuple[Any, ...] = (None,) * (inputs - 1)
            plan[name] = PrepareModuleInput(
                input_layouts=(stream, *rest), desired_input_layouts=(Replicate(), *rest)
            )
    if getattr(block.self_attn, "q_norm", None) is not None:  # over one head, and the heads are cut at dimension 1
        plan |= {f"self_attn.{name}": SequenceParallel(sequence_dim=1, use_local_output=True) for name in ("q_norm", "k_norm")}
    return plan


def _arrive(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return torch.mul(output, 1)
