"""Raise the rewards of sampled completions."""

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


@register("objective", "grpo", supports=("sharded_parameters", "tensor_parallel", "pipeline_parallel"))
class GRPOPlugin(ObjectivePlugin):
    """Raise the rewards of sampled completions."""

    weighs_tokens = is_around_zero = True

    def kinds(self, recipe: ObjectiveRecipe) -> tuple[SourceKind, ...]:
        return ("chat",)

    def conversations(self, recipe: ObjectiveRecipe) -> Conversations:
        return "padded"

    def samples_per_prompt(self, recipe: ObjectiveRecipe) -> int:
        return recipe.grpo.group_size if recipe.grpo.endpoint is None else 0

    def mistakes(self, recipe: ObjectiveRecipe) -> Iterator[Mistake]:
        if not recipe.grpo.rewards:
            yield Mistake("objective grpo needs at least one reward function", ("grpo.rewards", "name"))

    def build(self, inputs: ObjectiveInputs) -> StepObjective:
        from zero2all.tokens import TokenStore
        from zero2all.train.objectives.grpo_step import GRPOObjective
        from zero2all.train.objectives.rollouts import RolloutRanks

        recipe, ranks = inputs.run.recipe, RolloutRanks(inputs.model.mesh, inputs.ranks)
        validation = TokenStore(recipe.tokens_dir, "valid")
        return GRPOObjective(recipe, inputs.tokenizer, validation, ranks, inputs.ping)
