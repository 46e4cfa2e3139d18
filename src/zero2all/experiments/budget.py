"""The length of every run of an experiment: as in its recipe, a number of tokens or steps, or a time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from zero2all.base.errors import UsageError
from zero2all.base.io import fingerprint
from zero2all.base.units import Duration
from zero2all.recipe import Recipe
from zero2all.tokens import TokenStore
from zero2all.train.hyperparameters import BATCH_TOKENS, choose_hyperparameters, with_hyperparameters

SECONDS = {"s": 1, "m": 60, "h": 3600}
_TIME = re.compile(r"(\d+(?:\.\d+)?)([smh])")
TRIAL_STEPS = 200  # at most; a trial ends as soon as the speed is known
TRIAL_RUN = "speed-trial"  # its directory, inside the experiment's


@dataclass(frozen=True)
class Budget:
    """Either a time in seconds or a length."""

    text: str
    seconds: float | None = None
    length: Duration | None = None


def parse_budget(text: str) -> Budget:
    """``30s``, ``5m``, ``2h``, ``2M-tokens``, ``500-steps``."""
    if match := _TIME.fullmatch(text.strip()):
        seconds = float(match[1]) * SECONDS[match[2]]
        if seconds > 0:
            return Budget(text.strip(), seconds=seconds)
    elif text.strip().endswith(("tokens", "steps")):
        try:
            length = Duration.parse(text.strip().replace("-", " "))
        except ValueError as error:
            raise UsageError(f"--budget {text}: {error}") from None
        if length.value > 0:
            return Budget(text.strip(), length=length)
    raise UsageError(f"--budget {text}: write a time such as 30s, 5m or 2h, or a length such as 2M-tokens or 500-steps")


def refuse_stages(recipe: Recipe) -> None:
    """A budget is one length. How to divide it among stages is the user's decision."""
    if recipe.train.stages:
        names = ", ".join(stage.name for stage in recipe.train.stages)
        raise UsageError(
            f"the recipe has stages ({names}), so --budget cannot set its length: give each stage its length in the "
            "recipe and leave --budget out"
        )


def fix_length(recipe: Recipe, budget: Budget, step_seconds: dict[str, float]) -> Recipe:
    """The recipe with the length of the budget; for a time, the number of steps that fit into it."""
    length = budget.length
    if budget.seconds is not None:
        length = Duration(max(1, int(budget.seconds / step_seconds[speed_key(recipe)])), "steps")
    assert length is not None
    batch_tokens = recipe.train.batch_tokens
    if batch_tokens is not None and length.in_steps(batch_tokens, 1) < 1:
        raise UsageError(f"--budget {budget.text} is less than one step of {batch_tokens} tokens")
    lengths: dict[str, int | None] = {"steps": None, "tokens": None, "epochs": None, length.unit: int(length.value)}
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=lengths)})


def warmup_remark(recipe: Recipe, budget: Budget) -> str | None:
    """A warm-up that takes most of a run hides what the variants differ in."""
    batch_tokens, length, warmup = recipe.train.batch_tokens, recipe.train.duration, recipe.train.schedule.warmup
    if warmup.unit == "epochs" or (batch_tokens is None and length.unit != warmup.unit):
        return None
    steps, warming = (one.in_steps(batch_tokens or 1, 1) for one in (length, warmup))
    if 2 * warming <= steps:
        return None
    return (
        f"the warm-up of {warmup} takes {min(1.0, warming / steps):.0%} of --budget {budget.text}: set a shorter one, "
        f"such as train.schedule.warmup={max(1, steps // 10)}"
    )


def choose_batch(recipe: Recipe) -> Recipe:
    """Fix the batch size as for the length in the recipe: it decides how many steps fit into a time, and so may not
    depend on that number."""
    chosen = choose_hyperparameters(recipe, TokenStore(recipe.tokens_dir, "train").source_tokens)
    return with_hyperparameters(recipe, [one for one in chosen if one.key == BATCH_TOKENS])


def speed_key(recipe: Recipe) -> str:
    """Fingerprint of what decides the time of a step. Learning rates, seeds and data do not: variants that differ only
    in these get the same number of steps."""
    train = recipe.train
    shape = (train.seq_len, train.batch_tokens, train.micro_batch_tokens, train.device, train.precision, train.compile)
    return fingerprint(
        [
            recipe.model.model_dump(mode="json"),
            recipe.tokenizer.vocab_size,
            recipe.parallel.model_dump(mode="json"),
            *shape,
            train.masks_documents,
            train.deterministic,
            train.float8,
            train.optimizer.name,
        ]
    )


def trial_recipe(recipe: Recipe) -> Recipe:
    """A short run in which the time of a step is measured; nothing of it is kept."""
    options = {"steps": TRIAL_STEPS, "tokens": None, "epochs": None, "batch_ramp": None, "max_epochs": None}
    checkpoint = {"flash_every": None, "every": Duration(2 * TRIAL_STEPS, "steps"), "dir": None}
    return recipe.model_copy(
        update={
            "run": str(Path(recipe.run).with_name(TRIAL_RUN)),
            "train": recipe.train.model_copy(update=options),
            "checkpoint": recipe.checkpoint.model_copy(update=checkpoint),
            "evals": recipe.evals.model_copy(update={"every": None}),
            "track": recipe.track.model_copy(update={"sinks": []}),
        }
    )
