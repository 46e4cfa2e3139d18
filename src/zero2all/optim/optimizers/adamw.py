"""AdamW."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero2all.base.plugins import LAYOUTS, register
from zero2all.recipe.optimizer_plugin import OptimizerParameters, OptimizerPlugin

if TYPE_CHECKING:
    from torch.optim import Optimizer


@register("optimizer", "adamw", supports=(*LAYOUTS, "cpu_offload", "file_offload", "checkpoint_state"))
class AdamWPlugin(OptimizerPlugin):
    """AdamW, the default."""

    def build(self, parameters: OptimizerParameters) -> list[Optimizer]:
        import torch

        return [torch.optim.AdamW(parameters.groups(), fused=True)]
