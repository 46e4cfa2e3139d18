"""Steps that teach nothing: why, and what to change. The loss and the gradient of such a step are 0."""

from __future__ import annotations

from collections.abc import Mapping

from zero2all.recipe.objective import ObjectiveRecipe
from zero2all.train.data_loader import Batch


def idle_reason(batch: Batch, objective: ObjectiveRecipe, metrics: Mapping[str, float]) -> str | None:
    """Why no token of the step is trained on; None if some are. ``metrics`` are those of the objective."""
    if objective.name == "grpo":
        if metrics.get("truncated_answers") != 1.0 or not objective.grpo.mask_truncated:
            return None
        return (
            f"all answers were cut at {objective.max_answer_tokens} tokens, and cut answers are not trained on: "
            "raise train.objective.max_answer_tokens, or set train.objective.grpo.mask_truncated=false"
        )
    if batch.answers is not None:
        return "its batch has no answers to compare" if batch.answers.counts.examples == 0 else None
    if batch.global_valid_tokens > 0:
        return None
    return (
        "no token of its batch is a target: 'z2a tokens inspect' shows which are; answers longer than train.seq_len "
        "are cut before they start"
    )
