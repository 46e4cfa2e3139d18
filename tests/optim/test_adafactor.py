from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero2all.optim.adafactor import Adafactor


def shapes_and_gradients(steps: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    torch.manual_seed(0)
    shapes = ((12, 7), (7, 12), (1, 5), (9,))
    weights = [torch.randn(shape) * 0.1 for shape in shapes]
    return weights, [[torch.randn(shape) * 10 ** (step - 2) for shape in shapes] for step in range(steps)]


def run(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], gradients: list[list[Tensor]]) -> None:
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_it_updates_as_torch_does_without_relative_steps(weight_decay: float) -> None:
    """torch multiplies its rate by the size of a parameter, but at least by ``eps[1]``: here 1, which none exceeds."""
    weights, gradients = shapes_and_gradients(5)
    ours, theirs = ([nn.Parameter(weight.clone()) for weight in weights] for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": weight_decay}
    run(Adafactor(ours, **settings), ours, gradients)
    run(torch.optim.Adafactor(theirs, eps=(1e-15, 1.0), **settings), theirs, gradients)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-6)
    assert not torch.allclose(ours[0], weights[0])


def test_each_expert_is_a_matrix_by_itself() -> None:
    weights = torch.randn(3, 6, 4)
    stack, each = nn.Parameter(weights.clone()), [nn.Parameter(weight.clone()) for weight in weights]
    gradients = torch.randn(4, 3, 6, 4) * torch.tensor([1.0, 100.0, 0.0])[:, None, None]  # the last has no tokens
    run(Adafactor([stack], lr=0.1), [stack], [[gradient] for gradient in gradients])
    run(Adafactor(each, lr=0.1), each, [list(gradient) for gradient in gradients])
    for expert, matrix in zip(stack, each, strict=True):
        torch.testing.assert_close(expert, matrix, rtol=1e-6, atol=1e-6)
    assert torch.equal(stack[2], weights[2])
