"""Prefer completions with the label true."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero2all.base.conversation import SourceKind
from zero2all.base.plugins import register
from zero2all.recipe.objective import ObjectiveRecipe
from zero2all.recipe.objective_plugin import Conversations, ObjectivePlugin

if TYPE_CHECKING:
    from zero2all.train.objectives.build import ObjectiveInputs
    from zero2all.train.objectives.step import StepObjective


@register("objective", "kto", supports=("sharded_parameters", "tensor_parallel", "pipeline_parallel"))
class KTOPlugin(ObjectivePlugin):
    """Prefer completions with the label true."""

    compares_completions = weighs_tokens = True

    def kinds(self, recipe: ObjectiveRecipe) -> tuple[SourceKind, ...]:
        return ("rating", "preference")

    def conversations(self, recipe: ObjectiveRecipe) -> Conversations:
        return "packed" if recipe.packing else "padded"

    def needs_reference(self, recipe: ObjectiveRecipe) -> bool:
        return True

    def build(self, inputs: ObjectiveInputs) -> StepObjective:
        from zero2all.train.objectives.step import KTOObjective

        return KTOObjective(inputs.options.kto, inputs.completions(mismatched=True))
