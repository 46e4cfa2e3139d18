"""What differs between the run in a directory and the one that a recipe asks for."""

from __future__ import annotations

from collections.abc import Iterator

from zero2all.checkpoint import RunIdentity
from zero2all.checkpoint.training_state import StageIdentity


def identity_changes(before: RunIdentity, now: RunIdentity) -> list[str]:
    """Every difference, with the keys of the recipe to look at; empty if the run can be resumed."""
    changes = [change for pair in zip(before.stages, now.stages, strict=False) for change in _stage_changes(*pair)]
    if len(before.stages) != len(now.stages):
        changes.append(f"{len(before.stages)} stages begun, not {len(now.stages)} (train.stages)")
    if before.tokenizer != now.tokenizer:
        changes.append("another tokenizer")
    changes += [
        f"model.{key}={before.model.get(key)}, not {now.model.get(key)}"
        for key in dict.fromkeys([*before.model, *now.model])
        if before.model.get(key) != now.model.get(key)
    ]
    if before.optimizer != now.optimizer:
        changes.append(f"train.optimizer.name={before.optimizer}, not {now.optimizer}")
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
