"""A budget that the warm-up takes up is remarked."""

from __future__ import annotations

from zero2all.experiments.budget import fix_length, parse_budget, warmup_remark
from zero2all.recipe import parse_recipe

RECIPE = "train: {steps: 600, seq_len: 64, batch_tokens: 256}"


def remark(budget: str, *overrides: str) -> str | None:
    parsed = parse_budget(budget)
    return warmup_remark(fix_length(parse_recipe(RECIPE, list(overrides)), parsed, {}), parsed)


def test_the_default_warmup_takes_all_of_20_steps() -> None:
    assert remark("20-steps") == (
        "the warm-up of 20 steps takes 100% of --budget 20-steps: set a shorter one, such as train.schedule.warmup=2"
    )
    assert remark("5Ki-tokens") is not None  # 20 steps of 256 tokens
    assert remark("40-steps") is None
    assert remark("20-steps", "train.schedule.warmup=2") is None
    assert remark("20-steps", "train.batch_tokens=null") is not None
    assert remark("1M-tokens", "train.batch_tokens=null") is None  # the number of steps is unknown
