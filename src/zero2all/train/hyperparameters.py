"""Learning rate and batch size of a recipe that does not set them, from published laws, each with its source.

The law for AdamW was fitted on models of 60M to 1B parameters. It is a starting point: for a run that matters, sweep
the learning rate around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zero2all.base.errors import UsageError
from zero2all.base.units import show_count
from zero2all.model.cost.model_size import non_embedding_parameters
from zero2all.recipe import ModelConfig, Recipe, TrainRecipe
from zero2all.recipe.optimizer_plugin import LearningRateLaw

STEP_LAW = "Step Law, https://arxiv.org/abs/2503.04715"
MAX_LR = 2**-7  # the highest learning rate in the law's grid; a small model on much text would exceed it
TOKENS_PER_PARAMETER = 20  # compute-optimal: https://arxiv.org/abs/2203.15556

BATCH_TOKENS, OPTIMIZER = "train.batch_tokens", "train.optimizer."
MICRO_BATCH_TOKENS = "train.micro_batch_tokens"  # auto depends on memory: see ``micro_batch``


@dataclass(frozen=True)
class ChosenValue:
    """A value that the recipe leaves open."""

    key: str
    value: float
    source: str

    def __str__(self) -> str:
        return f"{self.key}={self.value:g} ({self.source})"


def step_law_lr(parameters: float, tokens: float) -> float:
    """Peak learning rate of AdamW for a number of non-embedding parameters and tokens."""
    return min(MAX_LR, 1.79 * math.pow(parameters, -0.713) * math.pow(tokens, 0.307))


def step_law_batch_tokens(tokens: float) -> float:
    """Tokens in a step; it hardly depends on the size of the model."""
    return 0.58 * math.pow(tokens, 0.571)


AS_IN_RUN = "as in the recipe of the run"


def choose_hyperparameters(
    recipe: Recipe,
    source_tokens: Mapping[str, int] | None = None,
    read_stored: Callable[[], Recipe | None] = lambda: None,
) -> list[ChosenValue]:
    """Values for what the recipe leaves open. Values in the stored recipe of a run come first: they stay the same when
    the run is extended, or when a later version has other laws.

    ``source_tokens`` are the tokens of each source; a length in epochs is unknown without them.
    """
    unset = _unset_keys(recipe)
    if not unset:
        return []
    kept = _stored_values(recipe, read_stored())
    chosen = {key: ChosenValue(key, kept[key], AS_IN_RUN) for key in unset if key in kept}
    if BATCH_TOKENS in unset and BATCH_TOKENS not in chosen:
        chosen[BATCH_TOKENS] = _choose_batch_tokens(recipe, source_tokens)
    batch = chosen[BATCH_TOKENS].value if BATCH_TOKENS in chosen else None
    for key in (key for key in unset if key.startswith(OPTIMIZER) and key not in chosen):
        law = _lr_law(recipe.model, planned_tokens(recipe.train, batch, source_tokens))
        lr, source = recipe.train.optimizer.plugin.learning_rate(key.removeprefix(OPTIMIZER), law)
        chosen[key] = ChosenValue(key, float(f"{lr:.2e}"), source)
    return [chosen[key] for key in unset if key in chosen]


def stored_micro_batch(recipe: Recipe, read_stored: Callable[[], Recipe | None]) -> int | None:
    """What the recipe that a run has stored says, in tokens; None if this one leaves nothing open."""
    stored = read_stored() if recipe.train.micro_batch_tokens == "auto" else None
    tokens = None if stored is None else stored.train.micro_batch_tokens
    return tokens if isinstance(tokens, int) else None


def with_hyperparameters(recipe: Recipe, chosen: list[ChosenValue]) -> Recipe:
    """The recipe with the chosen values filled in."""
    values = {one.key: one.value for one in chosen}
    optimizer = {key.removeprefix(OPTIMIZER): value for key, value in values.items() if key.startswith(OPTIMIZER)}
    update: dict[str, object] = {"optimizer": recipe.train.optimizer.model_copy(update=optimizer)}
    for key in (BATCH_TOKENS, MICRO_BATCH_TOKENS):
        if key in values:
            update[key.rpartition(".")[2]] = int(values[key])
    train = recipe.train.model_copy(update=update)
    if mistakes := list(train.mistakes()):  # a chosen batch may be smaller than where its ramp starts
        raise UsageError(f"{BATCH_TOKENS} was chosen: {mistakes[0].message}; set {BATCH_TOKENS}")
    return recipe.model_copy(update={"train": train})


def fill_hyperparameters(recipe: Recipe) -> Recipe:
    """The recipe as it would be trained, before there are tokens: for estimates of memory and speed."""
    return with_hyperparameters(recipe, choose_hyperparameters(recipe))


def planned_tokens(
    train: TrainRecipe, batch_tokens: float | None, source_tokens: Mapping[str, int] | None
) -> float | None:
    """Tokens of all stages; None if a stage counts steps of an unknown batch, or epochs of unknown sources."""
    total = 0.0
    for stage in train.resolved_stages():
        length, batch = stage.duration, stage.given_batch_tokens or batch_tokens
        if length.unit == "tokens":
            total += length.value
        elif length.unit == "steps" and batch is not None:
            total += length.value * batch
        elif length.unit == "epochs" and source_tokens is not None:
            total += length.value * sum(source_tokens.get(name, 0) for name in stage.mixture or source_tokens)
        else:
            return None
    return total


def lr_parameters(config: ModelConfig) -> float:
    """The parameters that a law takes: with muP, of the model at its base width, where the rate is tuned.

    In an MoE model only the active ones count: published models use the rate of dense models with as many. OLMoE
    (https://arxiv.org/abs/2409.02060) has OLMo 1B's, DeepSeekMoE 16B (https://arxiv.org/abs/2401.06066) the 7B model's.
    """
    return non_embedding_parameters(config) * config.mup_width_mult**2  # matrices scale with the square of the width


def _unset_keys(recipe: Recipe) -> list[str]:
    unset = [key for key, value in _open_values(recipe).items() if value is None]
    return [*unset, *([MICRO_BATCH_TOKENS] if recipe.train.micro_batch_tokens == "auto" else [])]


def _stored_values(recipe: Recipe, stored: Recipe | None) -> dict[str, float]:
    """Values of a run with the same model and optimizer; others cannot be resumed, so their values do not count."""
    if stored is None or stored.train.optimizer.name != recipe.train.optimizer.name:
        return {}
    shapes = [one.model.model_dump(exclude={"preset", "ops"}) for one in (recipe, stored)]
    if shapes[0] != shapes[1]:
        return {}
    return {key: value for key, value in _open_values(stored).items() if value is not None}


def _open_values(recipe: Recipe) -> dict[str, float | None]:
    """What a recipe may leave open, except the micro-batch."""
    optimizer = recipe.train.optimizer
    rates = {f"{OPTIMIZER}{key}": getattr(optimizer, key) for key in optimizer.plugin.rates}
    return {BATCH_TOKENS: recipe.train.batch_tokens, **rates}


def _choose_batch_tokens(recipe: Recipe, source_tokens: Mapping[str, int] | None) -> ChosenValue:
    train = recipe.train
    tokens = planned_tokens(train, None, source_tokens)
    assumed = "" if tokens else f", {TOKENS_PER_PARAMETER} per parameter"
    tokens = tokens or TOKENS_PER_PARAMETER * non_embedding_parameters(recipe.model)
    # Full samples of every stage, and a power of two of them, which divides over ranks and micro-batches.
    unit = math.lcm(
        train.seq_len, *(stage.seq_len for stage in train.resolved_stages() if not stage.given_batch_tokens)
    )
    doublings = max(0, round(math.log2(step_law_batch_tokens(tokens) / unit)))
    return ChosenValue(BATCH_TOKENS, unit * 2**doublings, f"{STEP_LAW}, for {show_count(tokens)} tokens{assumed}")


def _lr_law(config: ModelConfig, tokens: float | None) -> LearningRateLaw:
    parameters = lr_parameters(config)
    tokens = tokens or TOKENS_PER_PARAMETER * parameters
    source = f"{STEP_LAW}, for {show_count(parameters)} non-embedding parameters and {show_count(tokens)} tokens"
    if config.mup_base is not None:
        source += f", at the base width {config.mup_base}"
    return LearningRateLaw(step_law_lr(parameters, tokens), source)
