"""Prefer the chosen of two completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero2all.base.conversation import SourceKind
from zero2all.base.plugins import register
from zero2all.recipe.objective import ObjectiveRecipe
from zero2all.recipe.objective_plugin import Conversations, ObjectivePlugin

if TYPE_CHECKING:
    from zero2all.train.objectives.build import ObjectiveInputs
    from zero2all.train.objectives.step import StepObjective


@register("objective", "dpo", supports=("sharded_parameters", "tensor_parallel", "pipeline_parallel"))
class DPOPlugin(ObjectivePlugin):
    """Prefer the chosen of two completions."""

    compares_completions = weighs_tokens = True

    def kinds(self, recipe: ObjectiveRecipe) -> tuple[SourceKind, ...]:
        return ("preference",)

    def conversations(self, recipe: ObjectiveRecipe) -> Conversations:
        return "pairs"

    def needs_reference(self, recipe: ObjectiveRecipe) -> bool:
        return recipe.dpo.needs_reference

    def build(self, inputs: ObjectiveInputs) -> StepObjective:
        from zero2all.train.objectives.step import PreferenceObjective

        return PreferenceObjective(inputs.options.dpo, inputs.completions())
