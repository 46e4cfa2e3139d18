"""Pretraining: predict every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero2all.base.plugins import LAYOUTS, register
from zero2all.recipe.objective_plugin import ObjectivePlugin

if TYPE_CHECKING:
    from zero2all.train.objectives.build import ObjectiveInputs
    from zero2all.train.objectives.step import StepObjective


@register("objective", "pretrain", supports=LAYOUTS)
class PretrainPlugin(ObjectivePlugin):
    """Pretraining: predict every token."""

    def build(self, inputs: ObjectiveInputs) -> StepObjective:
        from zero2all.train.objectives.step import TokenObjective

        return TokenObjective(inputs.source_losses())
