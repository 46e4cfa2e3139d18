"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zero2all.base.plugins import LAYOUTS, register
from zero2all.recipe.optimizer_plugin import FP32_BYTES, LearningRateLaw, OptimizerParameters, OptimizerPlugin

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from zero2all.recipe.optimizer import OptimizerRecipe


@register("optimizer", "lion", supports=(*LAYOUTS, "cpu_offload", "checkpoint_state"))
class LionPlugin(OptimizerPlugin):
    """The sign of an interpolated momentum: half of the memory of AdamW."""

    def build(self, parameters: OptimizerParameters) -> list[Optimizer]:
        from zero2all.optim.lion import Lion

        return [Lion(parameters.groups())]

    def learning_rate(self, key: str, law: LearningRateLaw) -> tuple[float, str]:
        # The paper recommends a tenth to a third of AdamW's rate.
        return 0.2 * law.adamw, f"a fifth of AdamW's, https://arxiv.org/abs/2302.06675; {law.source}"

    def state_bytes(self, recipe: OptimizerRecipe, name: str, shape: Sequence[int]) -> int:
        return math.prod(shape) * FP32_BYTES
