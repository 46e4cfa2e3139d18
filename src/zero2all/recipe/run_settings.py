"""The fingerprint of a run: every key of the recipe, but for a list of exceptions. A new key is in it by itself.

A run resumes only with the values that it was trained with. ``model``, ``train.init`` and what decides the samples of
a stage are identified in fields of their own (``checkpoint.training_state``); all other keys are here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from zero2all.base.package_data import read_package_table
from zero2all.recipe.objective import ObjectiveRecipe
from zero2all.recipe.sections import Recipe
from zero2all.recipe.training import ResolvedStage, StageRecipe, TrainRecipe
from zero2all.recipe.types import Section

EXCEPTIONS: dict[str, str] = {
    key: exception["reason"]
    for exception in read_package_table(__package__, "fingerprint_exceptions.toml")["exceptions"]
    for key in exception["keys"]
}
"""Keys and sections that may change on resume without a word, each with the reason."""

ADJUSTABLE = ("train.optimizer", "train.guard", "train.precision", "train.float8", "parallel")
"""What ``--extend`` may change from the next step on: the saved state fits every value of these sections and keys."""
FIXED = ("train.optimizer.name",)
"""Exceptions to that: the optimizer decides which state there is."""

_OBJECTIVES = tuple(f"train.objective.{name}" for name, value in ObjectiveRecipe() if isinstance(value, Section))
_STAGE_KEYS = tuple(
    name for name in StageRecipe.model_fields if name != "name" and f"train.stages.{name}" not in EXCEPTIONS
)
_OWN_FIELDS = ("model", "train.init", "train.stages", *(f"train.{name}" for name in _STAGE_KEYS))


def is_adjustable(key: str) -> bool:
    return _is_below(key, ADJUSTABLE) and key not in FIXED


def run_settings(recipe: Recipe) -> dict[str, Any]:
    """Every key that is neither an exception nor has a field of its own, as JSON; paths are absolute."""
    objective = f"train.objective.{recipe.train.objective.name}"
    unused = [section for section in _OBJECTIVES if section != objective]
    return {key: value for key, value in _leaves(recipe) if not _is_below(key, unused)}


@cache
def default_settings() -> dict[str, Any]:
    """The values of a recipe that sets nothing, with the options of all objectives."""
    return dict(_leaves(Recipe()))


def stage_settings(stage: ResolvedStage) -> dict[str, Any]:
    """What a stage trains on: its own keys, or the keys of ``train`` that it inherits."""
    values = {name: getattr(stage, name) for name in _STAGE_KEYS}
    return {
        name: value.model_dump(mode="json") if isinstance(value, Section) else value for name, value in values.items()
    }


def is_stage_default(name: str) -> bool:
    """Whether ``train`` has a default for this key of a stage."""
    return name in TrainRecipe.model_fields


def _leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    dumped = section.model_dump(mode="json")
    for name, value in section:
        key = f"{prefix}{name}"
        if key in EXCEPTIONS or key in _OWN_FIELDS:
            continue
        if isinstance(value, Section):
            yield from _leaves(value, f"{key}.")
        elif name in dumped:
            yield key, str(value.absolute()) if isinstance(value, Path) else dumped[name]


def _is_below(key: str, sections: Any) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
