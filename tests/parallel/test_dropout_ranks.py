"""Dropout masks over ranks: different where tokens differ, equal where ranks repeat the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.utils import _to_kwargs

from tests.parallel.helpers import build_model, gradients, step
from tests.ranks import on_ranks
from zero2all.model import ModelInputs
from zero2all.model.z2all import Block
from zero2all.parallel import ParallelModel
from zero2all.parallel.fsdp import read_dropout_seed

RESIDUAL = {"residual_dropout": 0.3}
BOTH = {**RESIDUAL, "attention_dropout": 0.2}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp": ({}, BOTH),
    "tp with sp": ({"tp": 2}, BOTH),
    "tp without sp": ({"tp": 2, "sp": False}, RESIDUAL),
    "cp": ({"cp": 2}, RESIDUAL),
    "pp": ({"pp": 2}, BOTH),
}


def masks_of(run: Callable[[], Any]) -> list[Tensor]:
    drawn, draw = [], Block._draw_keep

    def remember(block: Block, x_BSD: Tensor) -> Tensor:
        drawn.append(draw(block, x_BSD))
        return drawn[-1]

    Block._draw_keep = remember  # type: ignore[method-assign]
    try:
        run()
    finally:
        Block._draw_keep = draw  # type: ignore[method-assign]
    return drawn


def run_micro_batches(model: ParallelModel, samples: int = 4) -> None:
    tokens = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(0))
    model.forward_backward(
        ModelInputs(tokens[:samples, :-1], tokens[:samples, 1:]), divisor=128, micro_batch_size=1, dropout_seed=5
    )


def on_every_layout() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (sizes, changes) in LAYOUTS.items():
        model = build_model("none", None, sizes, num_hidden_layers=2, **changes)
        torch.manual_seed(model.mesh.rank)  # which must not matter
        if name == "pp":
            run_micro_batches(model)
            found[name] = gradients(model)
        else:
            found[name] = masks_of(lambda model=model: step(model))
    return found


def test_ranks_draw_other_masks_where_they_hold_other_tokens() -> None:
    one, other = on_ranks(2, on_every_layout)
    equal = {
        name: [torch.equal(*pair) for pair in zip(one[name], other[name], strict=True)]
        for name in LAYOUTS.keys() - {"pp"}
    }
    for name in ("dp", "tp with sp", "cp"):
        assert len(equal[name]) == 4
        assert not any(equal[name]), name
    assert equal["tp without sp"] == [True] * 4

    # Stages of a pipeline draw what one process draws.
    single = build_model("none", None, {}, num_hidden_layers=2, **BOTH)
    run_micro_batches(single)
    expected, stages = gradients(single), {**one["pp"], **other["pp"]}
    assert stages.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(stages[name], value, atol=1e-6, rtol=1e-5)


def test_every_micro_batch_and_every_step_draws_its_own_mask() -> None:
    model = build_model("none", None, {}, num_hidden_layers=1, **RESIDUAL)
    masks = masks_of(lambda: run_micro_batches(model))
    assert len({mask.numpy().tobytes() for mask in masks}) == 8
    assert all(map(torch.equal, masks, masks_of(lambda: run_micro_batches(model))))
    tokens = torch.zeros(4, 32, dtype=torch.int64)
    later = masks_of(
        lambda: model.forward_backward(ModelInputs(tokens, tokens), divisor=128, micro_batch_size=1, dropout_seed=6)
    )
    assert not any(map(torch.equal, masks, later))
    assert not masks_of(lambda: model.eval_losses(tokens, tokens)), "no dropout in evaluation"


class Root(nn.Module):
    def forward(self, tokens_BS: Tensor, dropout_seeds_M: Any = None) -> Any:
        return dropout_seeds_M


def move_tensors(root: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """As FSDP's own hook does; tensors on meta cannot be read."""
    return args, {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in kwargs.items()}


def test_the_seed_is_read_before_tensors_are_moved() -> None:
    root = Root()
    root.register_forward_pre_hook(move_tensors, with_kwargs=True, prepend=True)
    root.register_forward_pre_hook(read_dropout_seed, with_kwargs=True, prepend=True)
    tokens = torch.zeros(1, 2)
    assert root(tokens_BS=tokens, dropout_seeds_M=torch.tensor([2**40 + 1])) == 2**40 + 1
    assert root(tokens_BS=tokens) is None


def test_seeds_inside_of_model_inputs_stay_in_main_memory() -> None:
    inputs = ModelInputs(torch.zeros(1, 2), dropout_seeds_M=torch.tensor([5]))
    moved, _ = _to_kwargs((inputs,), {}, torch.device("meta"), False)
    assert moved[0][0].dropout_seeds_M.device.type == "cpu"
