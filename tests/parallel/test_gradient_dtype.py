"""``parallel.gradient_dtype``: what is sent when ranks reduce gradients, and what is kept in fp32 all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel.helpers import gradients, make_model
from tests.parallel.test_gradient_accumulation import LENGTH, MICROS, VOCAB, alone, config, shape_of, tensors
from tests.ranks import on_ranks
from zero2all.model import ModelInputs
from zero2all.optim.optimizer import build_optimizers, set_learning_rate
from zero2all.parallel.sharded_init import to_local
from zero2all.recipe import OptimizerRecipe

RANKS, STEPS = 4, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "DDP": {"dp_replicate": RANKS, "dp_shard": 1},
    "FSDP": {},
    "HSDP": {"dp_replicate": 2},
    "HSDP, reduced with the last": {"dp_replicate": 2, "zero": 1},
    "FSDP x PP, reduced with the last": {"pp": 2, "zero": 1},
}
GRADIENT_TOLERANCE = 8e-3  # relative, of bf16 with its 8 bits: each rank's part is rounded, and the sum
LOSS_TOLERANCE = 2e-3  # after a few steps


@dataclass(frozen=True)
class Reduced:
    sent: int
    """Bytes of gradients that the collectives of a step were given."""
    held: set[torch.dtype]
    """Types of gradients between micro-batches."""
    off: float
    """Largest relative difference of a gradient from one process."""
    losses: list[float]
    weights: list[Tensor]


def reduce(sizes: dict[str, Any], dtype: str, one: dict[str, Tensor]) -> Reduced:
    model = make_model({**sizes, "gradient_dtype": dtype}, config(moe=False), seed=3)
    samples, sent, held = MICROS * model.mesh.dims.dp, [0], set[torch.dtype]()

    def counted(name: str, argument: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def call(*args: Any, **more: Any) -> Any:
            tensor = more[argument] if argument in more else args[0]
            sent[0] += tensor.numel() * tensor.element_size()
            return original(*args, **more)

        return call

    hook = model.model.register_forward_pre_hook(lambda *_: held.update(tensor.dtype for tensor in tensors(model)))
    tokens = torch.randint(0, VOCAB, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    own = tokens[slice(*model.mesh.sample_range(samples))]
    options = OptimizerRecipe(name="sgd", lr=0.5)
    optimizers = build_optimizers(model.model, options, model.param_groups, 1.0, model.ddp_group)
    set_learning_rate(optimizers, options, 1.0)
    losses, off = [], 0.0
    for step in range(STEPS):
        with pytest.MonkeyPatch.context() as patch:
            if step == 0:
                patch.setattr(dist, "reduce_scatter_single", counted("reduce_scatter_single", "input"))
                patch.setattr(dist, "all_reduce", counted("all_reduce", "tensor"))
            mine = model.forward_backward(
                ModelInputs(own[:, :-1], own[:, 1:]), divisor=samples * LENGTH, micro_batch_size=1
            )
        if step == 0:
            off = max(
                float((gradient - one[name]).norm() / one[name].norm()) for name, gradient in gradients(model).items()
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(model.all_reduce_sum(mine.sum())) / samples / LENGTH)
    hook.remove()
    return Reduced(sent[0], held, off, losses, [to_local(p.detach()) for p in model.model.parameters()])


def every_layout(references: dict[int, dict[str, Tensor]]) -> dict[tuple[str, str], Reduced]:
    return {
        (name, dtype): reduce(sizes, dtype, references[shape_of(sizes).dp])
        for name, sizes in LAYOUTS.items()
        for dtype in ("fp32", "bf16")
    }


@pytest.mark.long
def test_bf16_halves_what_is_sent_and_rounds_only_that() -> None:
    references = {dp: alone(MICROS * dp, moe=False) for dp in (2, 4)}
    for rank, found in enumerate(on_ranks(RANKS, every_layout, references, detail=False)):
        for name in LAYOUTS:
            fp32, bf16, where = found[name, "fp32"], found[name, "bf16"], f"{name}, rank {rank}"
            assert fp32.held <= {torch.float32}, where
            assert bf16.held == fp32.held, where
            assert fp32.off < 1e-5, where
            assert 1e-5 < bf16.off < GRADIENT_TOLERANCE, (where, bf16.off)
            assert bf16.losses == pytest.approx(fp32.losses, abs=LOSS_TOLERANCE), where
            assert bf16.losses[-1] < bf16.losses[0] - 0.05, "nothing was learned"
            if name == "DDP":  # its own all-reduce of fp32 is not seen from Python
                assert bf16.sent == 2 * sum(weight.numel() for weight in bf16.weights), where
            elif name == "HSDP":
                # Shards of a replica are added up in fp32 until the last micro-batch.
                assert bf16.sent == fp32.sent * (MICROS - 1 + 0.75) / (MICROS + 0.5), where
            else:
                assert bf16.sent == fp32.sent / 2, where
