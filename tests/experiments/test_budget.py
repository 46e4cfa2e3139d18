"""Budgets: parsing, and the length of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import TINY, tiny_recipe
from zero2all.base.errors import UsageError
from zero2all.base.units import Duration
from zero2all.experiments.budget import (
    choose_batch,
    fix_length,
    parse_budget,
    refuse_stages,
    speed_key,
    trial_recipe,
    warmup_remark,
)
from zero2all.recipe import parse_recipe


@pytest.mark.parametrize(
    ("text", "seconds", "length"),
    [
        ("30s", 30, None),
        ("5m", 300, None),
        ("1.5h", 5400, None),
        ("2M-tokens", None, Duration(2_000_000, "tokens")),
        ("64Ki tokens", None, Duration(65536, "tokens")),
        ("500-steps", None, Duration(500, "steps")),
    ],
)
def test_a_budget_is_a_time_or_a_length(text: str, seconds: float | None, length: Duration | None) -> None:
    budget = parse_budget(text)
    assert (budget.seconds, budget.length) == (seconds, length)


@pytest.mark.parametrize("text", ["", "5", "5M", "0s", "-5m", "5 minutes", "tokens", "0-tokens", "x-steps", "1-epochs"])
def test_anything_else_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match=r"--budget .*(2M-tokens|10M tokens)"):
        parse_budget(text)


def test_the_length_replaces_that_of_the_recipe() -> None:
    recipe = parse_recipe(TINY)
    assert fix_length(recipe, parse_budget("1Ki-tokens"), {}).train.duration == Duration(1024, "tokens")
    assert fix_length(recipe, parse_budget("7-steps"), {}).train.duration == Duration(7, "steps")
    fixed = fix_length(recipe, parse_budget("2m"), {speed_key(recipe): 0.25})
    assert fixed.train.duration == Duration(480, "steps")
    assert fix_length(recipe, parse_budget("1s"), {speed_key(recipe): 30.0}).train.steps == 1
    with pytest.raises(UsageError, match="less than one step of 256 tokens"):
        fix_length(recipe, parse_budget("100-tokens"), {})


def test_a_batch_that_is_not_set_is_chosen_before_the_steps_are(workspace: Path) -> None:
    recipe = tiny_recipe(workspace, "train.batch_tokens=null", "train.micro_batch_tokens=null", "train.tokens=8Ki")
    chosen = choose_batch(recipe)
    assert chosen.train.tokens_per_step % recipe.train.seq_len == 0
    assert chosen.train.duration == recipe.train.duration
    fixed = fix_length(chosen, parse_budget("1m"), {speed_key(chosen): 0.5})
    assert (fixed.train.steps, fixed.train.batch_tokens) == (120, chosen.train.batch_tokens)
    assert choose_batch(tiny_recipe(workspace)) == tiny_recipe(workspace)


def test_stages_and_a_budget_are_refused() -> None:
    stages = "train.stages=[{name: long, steps: 3}]"
    text = TINY.replace("  steps: 12\n", "")
    with pytest.raises(UsageError, match=r"stages \(long\).*leave --budget out"):
        refuse_stages(parse_recipe(text, [stages]))


def test_variants_of_the_same_speed_have_the_same_number_of_steps() -> None:
    key = speed_key(parse_recipe(TINY))
    for override in ("seed=3", "train.optimizer.lr=1", "train.schedule.shape=wsd", "corpus.holdout=0.2", "name=x"):
        assert speed_key(parse_recipe(TINY, [override])) == key, override
    for override in ("model.num_hidden_layers=3", "train.optimizer.name=muon", "train.batch_tokens=512"):
        assert speed_key(parse_recipe(TINY, [override])) != key, override


def test_a_trial_leaves_nothing_in_the_run_and_saves_nothing() -> None:
    recipe = parse_recipe(TINY, ["run=experiments/lr/lr-1e-3-seed1", "checkpoint.dir=ckpt", "evals.every=2 steps"])
    trial = trial_recipe(recipe)
    assert trial.run_dir.parent == recipe.run_dir.parent
    assert trial.run_dir != recipe.run_dir
    assert trial.checkpoint.dir is None
    assert trial.checkpoint.every.value > (trial.train.steps or 0)
    assert trial.evals.every is None
    assert Path(trial.run).name == "speed-trial"


WARMING = "train: {steps: 600, seq_len: 64, batch_tokens: 256}"


def remark(budget: str, *overrides: str) -> str | None:
    parsed = parse_budget(budget)
    return warmup_remark(
        fix_length(parse_recipe(WARMING, list(overrides)), parsed, {}),
        parsed,
    )


def test_the_default_warmup_takes_all_of_20_steps() -> None:
    assert remark("20-steps") == (
        "the warm-up of 20 steps takes 100% of --budget 20-steps: set a shorter one, such as train.schedule.warmup=2"
    )
    assert remark("5Ki-tokens") is not None  # 20 steps of 256 tokens
    assert remark("40-steps") is None
    assert remark("20-steps", "train.schedule.warmup=2") is None
    assert remark("20-steps", "train.batch_tokens=null") is not None
    assert remark("1M-tokens", "train.batch_tokens=null") is None  # the number of steps is unknown
