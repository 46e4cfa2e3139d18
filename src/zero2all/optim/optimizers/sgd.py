"""SGD with momentum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zero2all.base.plugins import LAYOUTS, register
from zero2all.recipe.optimizer_plugin import FP32_BYTES, LearningRateLaw, OptimizerParameters, OptimizerPlugin

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from zero2all.recipe.optimizer import OptimizerRecipe


@register("optimizer", "sgd", supports=(*LAYOUTS, "cpu_offload", "checkpoint_state"))
class SGDPlugin(OptimizerPlugin):
    """Stochastic gradient descent with momentum."""

    def build(self, parameters: OptimizerParameters) -> list[Optimizer]:
        import torch

        return [torch.optim.SGD(parameters.groups(), lr=1.0)]

    def learning_rate(self, key: str, law: LearningRateLaw) -> tuple[float, str]:
        return 0.1, "as for residual networks, https://arxiv.org/abs/1512.03385: no law is known"

    def state_bytes(self, recipe: OptimizerRecipe, name: str, shape: Sequence[int]) -> int:
        return math.prod(shape) * FP32_BYTES if recipe.momentum else 0
