"""AdamW in bf16 with stochastic rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from zero2all.base.plugins import LAYOUTS, register
from zero2all.recipe.optimizer_plugin import FP32_BYTES, OptimizerParameters, OptimizerPlugin

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from zero2all.recipe.optimizer import OptimizerRecipe

Rounding = Literal["stochastic", "kahan"]


@register("optimizer", "adamw-bf16", supports=(*LAYOUTS, "cpu_offload", "checkpoint_state"))
class AdamWBF16Plugin(OptimizerPlugin):
    """AdamW with weights, gradients and moments in bf16 (routers in fp32) and stochastic rounding."""

    has_bf16_weights = True
    rounding: ClassVar[Rounding] = "stochastic"
    compensation_bytes: ClassVar[int] = 0
    """For each weight in bf16."""

    def build(self, parameters: OptimizerParameters) -> list[Optimizer]:
        from zero2all.optim.adamw_bf16 import AdamWBF16, noise_key

        keys = {parameter: noise_key(parameters.seed, name) for name, parameter in parameters.named}
        return [AdamWBF16(parameters.groups(), keys, self.rounding, compile=parameters.compile)]

    def state_bytes(self, recipe: OptimizerRecipe, name: str, shape: Sequence[int]) -> int:
        from zero2all.model.cost.model_size import weight_dtype

        itemsize = weight_dtype(recipe, name).itemsize
        return math.prod(shape) * (2 * itemsize + (self.compensation_bytes if itemsize < FP32_BYTES else 0))
