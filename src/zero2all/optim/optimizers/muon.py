"""Muon for the matrices inside the blocks, AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zero2all.base.plugins import LAYOUTS, register
from zero2all.recipe.optimizer_plugin import FP32_BYTES, ROUTER, LearningRateLaw, OptimizerParameters, OptimizerPlugin

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from zero2all.recipe.optimizer import OptimizerRecipe


def updated_by_muon(name: str, dims: int) -> bool:
    """Matrices inside the blocks, experts among them (three dimensions, the first one is the expert).

    >>> updated_by_muon("layers.0.mlp.experts.up_proj", 3), updated_by_muon("layers.0.mlp.gate.weight", 2)
    (True, False)
    """
    return "layers." in name and dims >= 2 and ROUTER not in name


# Offload would multiply whole matrices on the CPU.


@register("optimizer", "muon", supports=(*LAYOUTS, "checkpoint_state"))
class MuonPlugin(OptimizerPlugin):
    """Orthogonalized momentum for the matrices inside the blocks, AdamW for the rest."""

    rates = ("lr", "muon_lr")

    def build(self, parameters: OptimizerParameters) -> list[Optimizer]:
        import torch

        from zero2all.optim.muon import Muon

        recipe = parameters.recipe
        in_blocks = [one for one in parameters.named if updated_by_muon(one[0], one[1].dim())]
        rest = [one for one in parameters.named if not updated_by_muon(one[0], one[1].dim())]
        optimizers: list[Optimizer] = []
        if groups := parameters.groups(rest):  # all adapters (LoRA) are matrices inside the blocks: none is left
            optimizers.append(torch.optim.AdamW(groups, fused=True))
        if groups := parameters.build_groups([parameter for _, parameter in in_blocks], decays=True, rate=1.0):
            dtype = torch.bfloat16 if recipe.muon_dtype == "bf16" else torch.float32
            optimizers.append(Muon(groups, dtype=dtype, replicas=parameters.replicas))
        return optimizers

    def learning_rate(self, key: str, law: LearningRateLaw) -> tuple[float, str]:
        if key == "muon_lr":  # scaling by shape in ``Muon`` makes one rate suit every width
            return 0.02, "for every width, https://kellerjordan.github.io/posts/muon/"
        return law.adamw, law.source

    def peak_lr(self, recipe: OptimizerRecipe, optimizer: Optimizer) -> float:
        return recipe.peak("muon_lr") if type(optimizer).__name__ == "Muon" else recipe.peak_lr

    def state_bytes(self, recipe: OptimizerRecipe, name: str, shape: Sequence[int]) -> int:
        return math.prod(shape) * (FP32_BYTES if updated_by_muon(name, len(shape)) else 2 * FP32_BYTES)
