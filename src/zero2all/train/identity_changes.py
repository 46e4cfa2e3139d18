"""What differs between the run in a directory and the one that a recipe asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zero2all.checkpoint import RunIdentity
from zero2all.checkpoint.training_state import StageIdentity


def identity_changes(before: RunIdentity, now: RunIdentity) -> list[str]:
    """Every difference, with the keys of the recipe to look at; empty if the run can be resumed."""
    changes = [change for pair in zip(before.stages, now.stages, strict=False) for change in _stage_changes(*pair)]
    if len(before.stages) != len(now.stages):
        changes.append(f"{len(before.stages)} stages begun, not {len(now.stages)} (train.stages)")
    if before.tokenizer != now.tokenizer:
        changes.append("another tokenizer")
    changes += model_changes(before.model, now.model)
    if before.optimizer != now.optimizer:
        changes.append(
            f"train.optimizer.name={before.optimizer}, not {now.optimizer} (another run can begin with the weights of "
            "this one: train.init)"
        )
    if before.init != now.init:
        changes.append(f"train.init={before.init}, not {now.init}")
    return changes


def model_changes(before: Mapping[str, Any], now: Mapping[str, Any], section: str = "model") -> list[str]:
    """The keys of a model config that differ, with both values."""
    changes = []
    for key in dict.fromkeys([*before, *now]):
        was, will_be = before.get(key), now.get(key)
        if isinstance(was, dict) and isinstance(will_be, dict):
            changes += model_changes(was, will_be, f"{section}.{key}")
        elif was != will_be:
            changes.append(f"{section}.{key}={was}, not {will_be}")
    return changes


def _stage_changes(before: StageIdentity, now: StageIdentity) -> Iterator[str]:
    if (before.name, before.first_step) != (now.name, now.first_step):
        yield f"stage {before.name} at step {before.first_step}, not {now.name} at step {now.first_step}"
        return
    if before.batch[0] != now.batch[0]:
        yield f"{before.batch[0]} samples in a batch of stage {now.name}, not {now.batch[0]} (train.batch_tokens)"
    elif before.batch != now.batch:
        yield f"another train.batch_ramp in stage {now.name}"
    if before.samples != now.samples:
        yield f"other samples in stage {now.name} (seed, train.seq_len, train.mixture, or the token store)"
    if before.rope != now.rope:
        yield f"another rope_theta or rope_scaling of stage {now.name}"
