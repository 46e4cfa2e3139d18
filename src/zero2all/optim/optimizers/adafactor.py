"""Adafactor: second moment by rows and columns, no first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zero2all.base.plugins import LAYOUTS, register
from zero2all.recipe.optimizer_plugin import FP32_BYTES, LearningRateLaw, OptimizerParameters, OptimizerPlugin

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from zero2all.recipe.optimizer import OptimizerRecipe


@register("optimizer", "adafactor", supports=(*LAYOUTS, "cpu_offload", "checkpoint_state"))
class AdafactorPlugin(OptimizerPlugin):
    """Adafactor: the second moment by rows and columns, and no first."""

    def build(self, parameters: OptimizerParameters) -> list[Optimizer]:
        from zero2all.optim.adafactor import Adafactor

        return [Adafactor(parameters.groups())]

    def learning_rate(self, key: str, law: LearningRateLaw) -> tuple[float, str]:
        return law.adamw, f"as for AdamW, whose updates are as large; {law.source}"

    def state_bytes(self, recipe: OptimizerRecipe, name: str, shape: Sequence[int]) -> int:
        *stack, rows, columns = shape if len(shape) > 1 else (math.prod(shape), 0)
        return math.prod(stack) * (rows + columns) * FP32_BYTES
