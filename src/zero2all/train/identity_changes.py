"""What differs between the run in a directory and the one that a recipe asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zero2all.checkpoint import RunIdentity
from zero2all.checkpoint.training_state import StageIdentity
from zero2all.recipe.run_settings import default_settings, is_adjustable, is_stage_default
from zero2all.recipe.training import ONLY_STAGE


@dataclass(frozen=True)
class Change:
    """A key of the recipe that does not have the value with which the run was trained."""

    key: str
    was: Any
    will_be: Any

    def __str__(self) -> str:
        return f"{self.key}={self.was}, not {self.will_be}"


def identity_changes(before: RunIdentity, now: RunIdentity) -> list[str]:
    """Every difference that no option allows, with the keys of the recipe; empty if the run can be resumed."""
    settings = [change for change in setting_changes(before.settings, now.settings) if not is_adjustable(change.key)]
    changes = list(map(str, settings))
    for pair in zip(before.stages, now.stages, strict=False):
        changes += _stage_changes(*pair, is_explained=bool(settings))
    if len(before.stages) != len(now.stages):
        changes.append(f"{len(before.stages)} stages begun, not {len(now.stages)} (train.stages)")
    if before.tokenizer != now.tokenizer:
        changes.append("a different tokenizer")
    changes += map(str, model_changes(before.model, now.model))
    if before.init != now.init:
        changes.append(f"train.init={before.init}, not {now.init}")
    return changes


def adjusted_settings(before: RunIdentity, now: RunIdentity) -> list[Change]:
    """The keys with other values that ``--extend`` allows."""
    return [change for change in setting_changes(before.settings, now.settings) if is_adjustable(change.key)]


def setting_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """A key that the version of ``before`` did not have was trained with its default."""
    for key, value in now.items():
        was = before.get(key, default_settings().get(key))
        if was != value:
            yield Change(key, was, value)


def model_changes(before: Mapping[str, Any], now: Mapping[str, Any], section: str = "model") -> list[Change]:
    """The keys of a section, by default of a model config, that differ."""
    changes = []
    for key in dict.fromkeys([*before, *now]):
        was, will_be = before.get(key), now.get(key)
        if isinstance(was, dict) and isinstance(will_be, dict):
            changes += model_changes(was, will_be, f"{section}.{key}")
        elif was != will_be:
            changes.append(Change(f"{section}.{key}", was, will_be))
    return changes


def stage_setting_changes(before: Mapping[str, Any], now: Mapping[str, Any], stage: str) -> list[Change]:
    """The keys that decide the samples of a stage."""
    changes = []
    for name, value in now.items():
        if name in before and before[name] != value:
            is_default = stage == ONLY_STAGE and is_stage_default(name)
            key = f"train.{name}" if is_default else f"train.stages.{stage}.{name}"
            if isinstance(value, dict) and isinstance(before[name], dict) and name != "mixture":
                changes += model_changes(before[name], value, key)
            else:
                changes.append(Change(key, before[name], value))
    return changes


def _stage_changes(before: StageIdentity, now: StageIdentity, is_explained: bool) -> Iterator[str]:
    """``is_explained`` if a key beside the stages, such as the seed, has changed the samples."""
    if (before.name, before.first_step) != (now.name, now.first_step):
        yield f"stage {before.name} at step {before.first_step}, not {now.name} at step {now.first_step}"
        return
    named = stage_setting_changes(before.settings, now.settings, now.name)
    yield from map(str, named)
    if named or is_explained:
        return
    if before.batch[0] != now.batch[0]:
        yield f"{before.batch[0]} samples in a batch of stage {now.name}, not {now.batch[0]} (train.batch_tokens)"
    elif before.batch != now.batch:
        yield f"a different train.batch_ramp in stage {now.name}"
    if before.samples != now.samples:
        keys = "seed, train.seq_len, train.mixture, or the token store"
        if before.settings:  # then none of these keys has changed
            keys = "the token store" + (", or the length with max_epochs" if now.settings["max_epochs"] else "")
        yield f"different samples in stage {now.name} ({keys})"
    if before.rope != now.rope:
        yield f"a different rope_theta or rope_scaling of stage {now.name}"
