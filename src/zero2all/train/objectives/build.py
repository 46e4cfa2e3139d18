"""From a recipe to the objective of its steps."""

from __future__ import annotations

from collections.abc import Callable

from zero2all.checkpoint import InitialWeights, RankGroup
from zero2all.parallel import ParallelModel
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenStore
from zero2all.train.objectives.answers import AnswerSources, open_reference
from zero2all.train.objectives.distill import DistillObjective
from zero2all.train.objectives.grpo_step import GRPOObjective
from zero2all.train.objectives.rollouts import RolloutRanks
from zero2all.train.objectives.step import (
    KTOObjective,
    PreferenceObjective,
    SourceLosses,
    StepObjective,
    TokenObjective,
)
from zero2all.train.plan import Plan
from zero2all.train.run import Run


def build_objective(
    run: Run, plan: Plan, model: ParallelModel, tokenizer: Tokenizer, ranks: RankGroup, ping: Callable[[], None]
) -> tuple[StepObjective, InitialWeights | None]:
    """The objective, and the initial weights if it had to load them for a reference.

    ``ping`` is called while answers are sampled, which may take minutes: it is no hang.
    """
    recipe, options = run.recipe, run.recipe.train.objective
    if options.name == "grpo":
        rollout_ranks = RolloutRanks(model.mesh, ranks)
        return GRPOObjective(recipe, tokenizer, TokenStore(recipe.tokens_dir, "valid"), rollout_ranks, ping), None
    if not options.compares_answers:
        sources = SourceLosses(plan.sources, tokenizer.token_byte_lengths, model.mesh.device)
        if options.name == "distill":
            return DistillObjective(recipe, tokenizer, sources, model, ranks, ping), None
        return TokenObjective(sources), None
    answers = AnswerSources(recipe, plan)
    loaded = open_reference(run, model, tokenizer, answers, ranks) if options.needs_reference else None
    if options.name == "dpo":
        return PreferenceObjective(options.dpo, answers), loaded
    return KTOObjective(options.kto, answers), loaded
