"""Learning rate and batch size that a recipe leaves open: what is chosen, and that a run keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import tiny_recipe
from zero2all.base.errors import UsageError
from zero2all.recipe import Recipe, load_recipe, parse_recipe
from zero2all.train import hyperparameters, train
from zero2all.train.hyperparameters import (
    BATCH_TOKENS,
    choose_hyperparameters,
    fill_hyperparameters,
    lr_parameters,
    step_law_batch_tokens,
    step_law_lr,
    with_hyperparameters,
)

LR, MUON = "train.optimizer.lr", "train.optimizer.muon_lr"
OPEN = ("train.optimizer.lr=null", "train.batch_tokens=null", "train.micro_batch_tokens=null")


def recipe_of(*overrides: str, preset: str = "z2all-85m") -> Recipe:
    return parse_recipe(f"{{model: {{preset: {preset}}}, train: {{tokens: 2B, seq_len: 512}}}}", list(overrides))


def chosen(*overrides: str, preset: str = "z2all-85m", source_tokens: dict[str, int] | None = None) -> dict[str, float]:
    values = choose_hyperparameters(recipe_of(*overrides, preset=preset), source_tokens)
    return {value.key: value.value for value in values}


def test_the_law_has_its_published_coefficients() -> None:
    assert step_law_lr(1e9, 100e9) == pytest.approx(1.64e-3, rel=0.01)
    assert step_law_batch_tokens(100e9) == pytest.approx(1.11e6, rel=0.01)
    assert step_law_lr(1e6, 1e12) == 2**-7  # beyond the rates that it was fitted on


def test_a_larger_model_has_a_lower_rate() -> None:
    sizes = ("z2all-3m", "z2all-25m", "z2all-85m", "z2all-300m", "z2all-1.1b")
    rates = [chosen(preset=preset)[LR] for preset in sizes]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 5 * rates[-1]


def test_every_optimizer_has_its_rate() -> None:
    adamw = chosen()[LR]
    assert adamw == float(f"{step_law_lr(lr_parameters(recipe_of().model), 2e9):.2e}")
    for same in ("adamw-8bit", "adamw-bf16", "adafactor"):
        assert chosen(f"train.optimizer.name={same}")[LR] == adamw
    assert chosen("train.optimizer.name=lion")[LR] == pytest.approx(adamw / 5, rel=0.01)
    assert chosen("train.optimizer.name=sgd")[LR] == 0.1
    assert chosen("train.optimizer.name=muon") == {**chosen(), MUON: 0.02}
    assert MUON not in chosen()


def test_experts_count_if_a_token_uses_them() -> None:
    moe = "model.moe={num_experts: 16, num_experts_per_tok: 2, moe_intermediate_size: 1024}"
    active = lr_parameters(recipe_of(moe).model)
    assert active == pytest.approx(lr_parameters(recipe_of().model), rel=0.01)  # 2 x 1024 is the dense width
    assert active == lr_parameters(recipe_of(moe, "model.mtp_weight=0.3", "model.vocab_size=64320").model)


def test_mup_has_the_rate_of_its_base_width() -> None:
    narrow = (
        "model.hidden_size=384",
        "model.intermediate_size=1024",
        "model.num_attention_heads=6",
        "model.num_key_value_heads=2",
    )
    untied = "model.tie_word_embeddings=false"
    assert chosen(untied, "model.mup_base=384")[LR] == pytest.approx(chosen(untied, *narrow)[LR], rel=0.01)


def test_the_batch_is_a_power_of_two_of_samples_of_every_stage() -> None:
    assert chosen()[BATCH_TOKENS] == 2**17  # 119K tokens by the law
    stages = "train.stages=[{name: a, tokens: 2B}, {name: b, tokens: 1M, seq_len: 768}]"
    batch = chosen("train.tokens=null", stages)[BATCH_TOKENS]
    assert batch in (1536 * 2**6, 1536 * 2**7)
    assert recipe_of("train.tokens=null", stages, f"train.batch_tokens={int(batch)}")


def test_a_length_in_steps_has_the_batch_of_20_tokens_per_parameter() -> None:
    """More tokens are better at a given number of steps, so the law has nothing to say about a short run."""
    batches = {chosen(f"train.steps={steps}")[BATCH_TOKENS] for steps in (10, 100_000)}
    assert batches == {2**17}
    assert chosen("train.steps=10")[LR] < chosen("train.steps=100_000")[LR]


def test_epochs_count_when_the_tokens_are_known() -> None:
    epochs = ("train.epochs=2", "train.mixture={zh: 1, en: 1}")
    known = chosen(*epochs, source_tokens={"zh": 10**8, "en": 2 * 10**8, "code": 10**10})
    assert known == chosen("train.tokens=600M")
    assert chosen(*epochs)[LR] == chosen(f"train.tokens={20 * int(lr_parameters(recipe_of().model))}")[LR]


def test_what_a_recipe_sets_is_kept_and_nothing_is_read() -> None:
    def refuse() -> Recipe:
        raise AssertionError("the recipe of the run was read")

    full = recipe_of("train.optimizer.lr=1e-4", "train.batch_tokens=2048")
    assert choose_hyperparameters(full, read_stored=refuse) == []
    assert with_hyperparameters(full, []) == full
    assert chosen("train.optimizer.lr=1e-4") == {BATCH_TOKENS: 2**17}


def test_a_ramp_that_starts_above_the_chosen_batch_is_refused() -> None:
    with pytest.raises(UsageError, match=r"batch_ramp\.start .* set train\.batch_tokens"):
        fill_hyperparameters(recipe_of("train.batch_ramp={start: 1Mi, over: 5 steps}"))


def test_a_run_keeps_its_values(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = f"out={tmp_path}"
    train(tiny_recipe(workspace, out, *OPEN, "train.steps=2"))
    first = load_recipe(tmp_path / "run" / "recipe.yaml").train
    assert first.optimizer.lr == pytest.approx(2**-7, rel=0.01)  # the highest: the model is tiny
    assert first.batch_tokens is not None
    assert first.optimizer.muon_lr is None
    # A longer run and another law would choose other values.
    monkeypatch.setattr(hyperparameters, "step_law_lr", lambda parameters, tokens: 1e-4)
    monkeypatch.setattr(hyperparameters, "step_law_batch_tokens", lambda tokens: 10.0)
    assert train(tiny_recipe(workspace, out, *OPEN, "train.steps=3")).resumed_at == 2
    extended = load_recipe(tmp_path / "run" / "recipe.yaml").train
    assert (extended.optimizer.lr, extended.batch_tokens) == (first.optimizer.lr, first.batch_tokens)
    train(tiny_recipe(workspace, out, *OPEN, "train.steps=3", "run=sibling"))
    assert load_recipe(tmp_path / "sibling" / "recipe.yaml").train.optimizer.lr == 1e-4


@pytest.mark.parametrize("change", ["model.num_hidden_layers=1", "train.optimizer.name=lion"])
def test_values_of_another_model_are_not_kept(change: str, workspace: Path) -> None:
    stored = tiny_recipe(workspace, "train.optimizer.lr=0.0123", "train.batch_tokens=320")
    open_recipe = tiny_recipe(workspace, *OPEN, change)
    values = {value.key: value.value for value in choose_hyperparameters(open_recipe, read_stored=lambda: stored)}
    assert values[LR] != 0.0123
    assert values[BATCH_TOKENS] != 320
