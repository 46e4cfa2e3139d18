"""AdamW of torchao, with moments in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zero2all.base.errors import need
from zero2all.base.plugins import LAYOUTS, register
from zero2all.recipe.optimizer_plugin import FP32_BYTES, OptimizerParameters, OptimizerPlugin

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from zero2all.recipe.optimizer import OptimizerRecipe

# torchao keeps smaller tensors, and those that are not a multiple of a block, in fp32.
MIN_ELEMENTS, BLOCK_ELEMENTS = 4096, 256
TABLE_BYTES = 256 * FP32_BYTES  # what the 256 values of a code mean, for each tensor


@register("optimizer", "adamw-8bit", supports=(*LAYOUTS, "cpu_offload", "checkpoint_state"))
class AdamW8bitPlugin(OptimizerPlugin):
    """AdamW with moments in 8 bits (torchao)."""

    def build(self, parameters: OptimizerParameters) -> list[Optimizer]:
        return [need("torchao.optim", "quant").AdamW8bit(parameters.groups())]

    def state_bytes(self, recipe: OptimizerRecipe, name: str, shape: Sequence[int]) -> int:
        count = math.prod(shape)
        if count < MIN_ELEMENTS or count % BLOCK_ELEMENTS:
            return count * 2 * FP32_BYTES
        return 2 * (count + count // BLOCK_ELEMENTS * FP32_BYTES + TABLE_BYTES)
