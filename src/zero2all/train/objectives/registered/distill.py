"""Learn the probabilities of a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zero2all.base.conversation import SourceKind
from zero2all.base.plugins import register
from zero2all.recipe.objective import ObjectiveRecipe
from zero2all.recipe.objective_plugin import Conversations, ObjectivePlugin
from zero2all.recipe.types import Mistake

if TYPE_CHECKING:
    from zero2all.train.objectives.build import ObjectiveInputs
    from zero2all.train.objectives.step import StepObjective


@register("objective", "distill", supports=("sharded_parameters",))
class DistillPlugin(ObjectivePlugin):
    """Learn the probabilities of a teacher."""

    has_teacher = True

    def kinds(self, recipe: ObjectiveRecipe) -> tuple[SourceKind, ...]:
        return ("chat",) if recipe.distill.on_policy else ("text", "chat")

    def conversations(self, recipe: ObjectiveRecipe) -> Conversations:
        return "padded" if recipe.distill.on_policy else "cut"

    def samples_per_prompt(self, recipe: ObjectiveRecipe) -> int:
        return int(recipe.distill.on_policy)

    def mistakes(self, recipe: ObjectiveRecipe) -> Iterator[Mistake]:
        if recipe.distill.teacher is None:
            yield Mistake("objective distill needs a teacher", ("distill.teacher", "name"))

    def build(self, inputs: ObjectiveInputs) -> StepObjective:
        from zero2all.train.objectives.distill import DistillObjective

        recipe, sources = inputs.run.recipe, inputs.source_losses()
        return DistillObjective(recipe, inputs.tokenizer, sources, inputs.model, inputs.ranks, inputs.ping)
