"""A step that teaches nothing is reported with its cause and remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zero2all.recipe.objective import ObjectiveRecipe
from zero2all.train.objectives.grpo_step import why_truncated
from zero2all.train.objectives.step import why_idle

GRPO = {"name": "grpo", "max_answer_tokens": 16, "grpo": {"rewards": ["a:b"]}}
UNMASKED = {"name": "grpo", "grpo": {"rewards": ["a:b"], "mask_truncated": False}}


def reason(
    objective: dict[str, Any], metrics: dict[str, float], targets: int = 100, examples: int | None = None
) -> str:
    if objective["name"] == "grpo":
        return why_truncated(ObjectiveRecipe.model_validate(objective), metrics) or ""
    completions = None if examples is None else SimpleNamespace(counts=SimpleNamespace(examples=examples))
    batch: Any = SimpleNamespace(global_valid_tokens=targets, completions=completions)
    return why_idle(batch) or ""


@pytest.mark.parametrize(
    ("objective", "metrics", "batch", "expected"),
    [
        (GRPO, {"truncated_answers": 1.0, "groups_without_spread": 0.2}, {}, "cut at 16 tokens"),
        (GRPO, {"truncated_answers": 1.0, "groups_without_spread": 0.2}, {}, "train.objective.max_answer_tokens"),
        (GRPO, {"truncated_answers": 0.9, "groups_without_spread": 1.0}, {}, ""),
        (GRPO, {"truncated_answers": 0.9, "groups_without_spread": 0.9}, {}, ""),
        (UNMASKED, {"truncated_answers": 1.0, "groups_without_spread": 0.0}, {}, ""),
        ({"name": "sft"}, {}, {"targets": 0}, "z2a tokens inspect"),
        ({"name": "sft"}, {}, {"targets": 1}, ""),
        ({"name": "pretrain"}, {}, {}, ""),
        ({"name": "dpo"}, {}, {"examples": 0}, "no completions"),
        ({"name": "dpo"}, {}, {"examples": 3}, ""),
    ],
)
def test_the_cause_is_named(
    objective: dict[str, Any], metrics: dict[str, float], batch: dict[str, int], expected: str
) -> None:
    found = reason(objective, metrics, **batch)
    assert bool(found) == bool(expected)
    assert expected in found
