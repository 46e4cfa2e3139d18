"""From a recipe to the objective of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zero2all.checkpoint import InitialWeights, RankGroup
from zero2all.parallel import ParallelModel
from zero2all.recipe.objective import ObjectiveRecipe
from zero2all.tokenizer import Tokenizer
from zero2all.train.objectives.completions import CompletionSources, open_reference
from zero2all.train.objectives.step import SourceLosses, StepObjective
from zero2all.train.plan import Plan
from zero2all.train.run import Run


@dataclass
class ObjectiveInputs:
    """What an objective may be built from."""

    run: Run
    plan: Plan
    model: ParallelModel
    tokenizer: Tokenizer
    ranks: RankGroup
    ping: Callable[[], None]
    """To be called while completions are sampled, which may take minutes: it is no hang."""
    initial_weights: InitialWeights | None = None
    """Weights that had to be loaded for a reference."""

    @property
    def options(self) -> ObjectiveRecipe:
        return self.run.recipe.train.objective

    def source_losses(self) -> SourceLosses:
        return SourceLosses(self.plan.sources, self.tokenizer.token_byte_lengths, self.model.mesh.device)

    def completions(self, *, mismatched: bool = False) -> CompletionSources:
        """The completions to compare, with their log-probabilities by the reference if there is one. With
        ``mismatched`` also completions of other prompts."""
        completions = CompletionSources(self.run.recipe, self.plan, mismatched=mismatched)
        if self.options.needs_reference:
            self.initial_weights = open_reference(self.run, self.model, self.tokenizer, completions, self.ranks)
        return completions


def build_objective(inputs: ObjectiveInputs) -> tuple[StepObjective, InitialWeights | None]:
    """The objective, and the initial weights if it had to load them for a reference."""
    bound = inputs.options.bound
    with bound.named():
        objective: StepObjective = bound().build(inputs)
    bound.guard(objective, "begin", "sums", "loss", "metrics", "validate")
    return objective, inputs.initial_weights
