"""`z2a recipe check` reports every mistake at once, and none that nobody made."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from zero2all.base.errors import RecipeError
from zero2all.recipe import Recipe, parse_recipe
from zero2all.recipe.problems import _section_mistakes, find_problems
from zero2all.recipe.types import COLLECT_MISTAKES

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
EVEN = {"num_attention_heads": 4, "num_key_value_heads": 4}  # of 192; 2 and 4 divide both
RAMP = {"start": 1024, "over": 5}
# A recipe that breaks one rule, and the beginning of the message.
BROKEN_RULES: dict[str, dict[str, Any]] = {
    "num_attention_heads (4) must be": {"model": {"num_attention_heads": 4, "num_key_value_heads": 3}},
    "hidden_size (192) must be": {"model": {"num_attention_heads": 5}},
    "head size (3) must be even": {"model": {"num_attention_heads": 64}},
    "full_attention_interval sets": {"model": {"full_attention_interval": 2}},
    "moe.first_k_dense_replace (7)": {"model": {"moe": {**MOE, "first_k_dense_replace": 7}}},
    "num_experts_per_tok (5) is more": {"model": {"moe": {**MOE, "num_experts_per_tok": 5}}},
    "mup_base scales the head": {"model": {"mup_base": 64, "tie_word_embeddings": True}},
    "yarn needs original": {"model": {"rope_scaling": {"rope_type": "yarn", "factor": 2}}},
    "give exactly one of steps, tokens, epochs, or stages (given: none)": {"train": {"steps": None}},
    "give exactly one of steps, tokens, epochs, or stages (given: steps, tokens)": {"train": {"tokens": 5}},
    "steps and stages": {"train": {"stages": [{"name": "a", "steps": 1}]}},
    "give exactly one of steps, tokens, epochs (given: none)": {"train": {"steps": None, "stages": [{"name": "a"}]}},
    "two stages share": {"train": {"steps": None, "stages": [{"name": "a", "steps": 1}] * 2}},
    "batch_tokens (1000)": {"train": {"batch_tokens": 1000}},
    "stage a: batch_tokens (1000)": {
        "train": {"steps": None, "stages": [{"name": "a", "steps": 1, "batch_tokens": 1000}]}
    },
    "micro_batch_tokens (1000)": {"train": {"micro_batch_tokens": 1000}},
    "batch_ramp.start (1000)": {"train": {"batch_ramp": {**RAMP, "start": 1000}}},
    "batch_ramp.start (32768)": {"train": {"batch_tokens": 16384, "batch_ramp": {**RAMP, "start": 32768}}},
    "train.seq_len (1024) is longer": {"train": {"seq_len": 1024}},
    "train.mixture names b": {"train": {"mixture": {"b": 1}}, "corpus": {"sources": [{"name": "a", "paths": ["x"]}]}},
    "model.vocab_size (320) is smaller": {"model": {"vocab_size": 320}},
    "only one of dp_replicate": {"parallel": {"dp_replicate": "auto"}},
    "zero=2 keeps the gathered weights": {"parallel": {"zero": 2, "reshard_after_forward": "always"}},
    "offload is for shards": {"parallel": {"offload": "cpu", "dp_replicate": 2}},
    "optimizer muon does not support cpu_offload": {
        "parallel": {"offload": "cpu"},
        "train": {"optimizer": {"name": "muon"}},
    },
    "optimizer lion does not support file_offload": {
        "parallel": {"offload": "/nvme"},
        "train": {"optimizer": {"name": "lion"}},
    },
    "parallel.tp (2) must divide model.num_key_value_heads (1)": {
        "parallel": {"tp": 2},
        "model": {"num_attention_heads": 4},
    },
    "parallel.tp (2) must divide model.intermediate_size (513)": {
        "parallel": {"tp": 2},
        "model": {**EVEN, "intermediate_size": 513},
    },
    "parallel.tp (3) must divide the 8192 rows": {
        "parallel": {"tp": 3, "sp": False},
        "model": {"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 510, "vocab_size": 8192},
    },
    "train.seq_len (510) must be a multiple of 2 x parallel.cp (4)": {
        "parallel": {"cp": 2, "sp": False},
        "train": {"seq_len": 510, "batch_tokens": 5100},
    },
    "train.seq_len (512) must be a multiple of cp x tp (3)": {
        "parallel": {"tp": 3},
        "model": {"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 510},
    },
    "ulysses shards": {"parallel": {"cp": 2, "cp_attention": "ulysses"}},
    "the compiler keeps": {"parallel": {"activation_checkpointing": "budget"}, "train": {"compile": False}},
    "the multi-token prediction": {"parallel": {"cp": 2}, "model": {"mtp_weight": 0.1}},
    "8 pipeline stages": {"parallel": {"pp": 8}},
    "embedding and head are on": {"parallel": {"pp": 2}, "model": {"tie_word_embeddings": True}},
    "schedule zbv cannot split": {"parallel": {"pp": 2, "schedule": "zbv"}, "train": {"compile": True}},
    "schedule zbv loses": {"parallel": {"pp": 2, "schedule": "zbv", "reshard_after_forward": "always"}},
    "schedule zbv recomputes": {"parallel": {"pp": 2, "schedule": "zbv", "activation_checkpointing": "selective"}},
    "the balance loss": {"parallel": {"pp": 2}, "model": {"moe": MOE}},
    "parallel.ep is 2, but": {"parallel": {"ep": 2}},
    "parallel.ep (3) must divide": {"parallel": {"ep": 3}, "model": {"moe": MOE}},
    "experts are not sharded": {"parallel": {"tp": 2}, "model": {**EVEN, "moe": MOE}},
}


def with_length(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "train": {"steps": 1, **values.get("train", {})}}


def messages(values: dict[str, Any]) -> list[str]:
    return [problem.message for problem in find_problems(values, {})]


def mistakes(text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, list(overrides))
    return [str(problem) for problem in caught.value.problems]


def replaced(values: Any, key: str, value: object) -> Any:
    """A copy of the values with another value at a dotted key, which is made if it does not exist."""
    first, _, rest = key.partition(".")
    if isinstance(values, list):
        return [replaced(one, rest, value) if index == int(first) else one for index, one in enumerate(values)]
    return {**values, first: replaced(values.get(first) or {}, rest, value) if rest else value}


@pytest.mark.parametrize("message", BROKEN_RULES)
def test_each_rule_over_several_values_can_be_broken_alone(message: str) -> None:
    [said] = messages(with_length(BROKEN_RULES[message]))
    assert said.startswith(message)
    with pytest.raises(ValueError, match="value_error"):
        Recipe.model_validate(with_length(BROKEN_RULES[message]))


@pytest.mark.parametrize("message", BROKEN_RULES)
def test_a_rule_over_an_invalid_value_is_not_reported(message: str) -> None:
    values = with_length(BROKEN_RULES[message])
    for key in broken_rule_keys(values):
        if ".0." not in key or "stages" in values["train"]:  # else a key of a stage that this recipe does not have
            said = messages(replaced(values, key, {"?": "?"}))
            assert said, key
            assert not any(one.startswith(message) for one in said), (key, said)


def broken_rule_keys(values: dict[str, Any]) -> list[str]:
    """The keys, from the top, of the one rule that is broken."""
    [(section, mistake)] = _section_mistakes(Recipe.model_validate(values, context=COLLECT_MISTAKES))
    return [".".join(map(str, (*section, key))) for key in mistake.keys]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{train: {steps: 1, seq_len: 1024}, model: {preset: z2all-100m}}", ["no preset 'z2all-100m'"]),
        ("{train: {steps: 1, seq_len: 1024}, model: {preset: z2all-10m, mup_base: 64}}", ["mup_base scales"]),
        ("{train: {steps: 1}, model: {hidden_size: 256, num_attention_head: 4}}", ["no such key"]),
        ("{train: {steps: 1}, parallel: {dp_shard: 0}}", ["greater than or equal to 1, or 'auto'; it is 0"]),
        ("{train: {steps: 1}, parallel: {ep: 2}, model: {moe: {num_experts: 4}}}", ["is required"] * 2),
        ("{train: {steps: 1}, parallel: {offload: cup}}", ["must be none, cpu, or a directory with a slash"]),
        ("{train: {stages: [{steps: 1}]}}", ["is required"]),
        ("{train: {stages: [{name: a, steps: x}]}}", ["'x'"]),
        ("{train: {steps: 1, batch_tokens: x, seq_len: 1000}, model: {max_position_embeddings: 1000}}", ["'x'"]),
        ("{train: {steps: 1}, corpus: {filters: [5]}}", ["valid string, or a valid dictionary; it is 5"]),
    ],
)
def test_nothing_is_reported_that_nobody_wrote(text: str, expected: list[str]) -> None:
    said = mistakes(text)
    assert len(said) == len(expected), said
    assert all(part in one for part, one in zip(expected, said, strict=True)), said


def test_a_head_count_that_does_not_fit_is_reported_with_its_own_value_only() -> None:
    said = mistakes("{train: {steps: 1}, model: {preset: z2all-3m, num_attention_heads: 7}, parallel: {tp: 2}}")
    assert [one.partition(": ")[2] for one in said] == [
        "hidden_size (192) must be a multiple of num_attention_heads (7)",
        "parallel.tp (2) must divide model.num_attention_heads (7)",
        "parallel.tp (2) must divide model.num_key_value_heads (1)",
    ]


def test_mistakes_of_every_kind_are_reported_at_once() -> None:
    """Single values, required values, and rules of a section and over sections, none behind another."""
    text = yaml.safe_dump(
        {
            "corpus": {"sources": [{"name": "a"}]},
            "model": {"num_attention_heads": 7, "mup_base": 64, "tie_word_embeddings": True},
            "train": {
                "steps": 1,
                "seq_len": 1000,
                "batch_tokens": 16384,
                "optimizer": {"lr": "fast"},
                "stages": [{"name": "s", "steps": 1}],
            },
            "parallel": {"tp": 2, "dp_replicate": "auto"},
        }
    )
    said = "\n".join(mistakes(text))
    for part in (
        "corpus.sources.0.paths: is required",
        "train.optimizer.lr",
        "hidden_size (192) must be a multiple",
        "mup_base scales",
        "steps and stages",
        "batch_tokens (16384) must be a multiple of seq_len (1000)",
        "seq_len (1000) is longer",
        "only one of dp_replicate",
        "must divide model.num_attention_heads (7)",
    ):
        assert part in said
    assert said.count("\n") == 9  # and num_key_value_heads (1), which tp does not divide either


def test_a_rule_is_located_at_the_value_that_is_in_the_file() -> None:
    text = "model:\n  preset: z2all-3m\ntrain:\n  steps: 1\n  batch_tokens: 1000\nparallel:\n  tp: 2\n"
    assert mistakes(text)[0] == "line 5, train: batch_tokens (1000) must be a multiple of seq_len (512)"
    assert all(one.startswith("line 7: parallel.tp (2)") for one in mistakes(text)[1:])


def test_a_rule_that_an_override_breaks_is_a_mistake_of_the_override() -> None:
    text = "train:\n  steps: 1\n  seq_len: 512\nmodel:\n  preset: z2all-3m\n"
    assert mistakes(text, "train.batch_tokens=1000") == [
        "command line, train.batch_tokens=1000: batch_tokens (1000) must be a multiple of seq_len (512)"
    ]
    assert mistakes(text, "model.max_position_embeddings=256") == [
        "command line, model.max_position_embeddings=256: "
        "train.seq_len (512) is longer than model.max_position_embeddings (256)"
    ]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("steps", "did you mean train.steps?"),
        ("step", "did you mean train.steps?"),
        ("lr", "did you mean train.optimizer.lr?"),
        ("train.lr", "did you mean train.optimizer.lr?"),
        ("train.stpes", "did you mean steps?"),
        ("train.warmup", "did you mean train.schedule.warmup?"),
        ("optimizer.lr", "did you mean train.optimizer?"),
        ("model.seq_len", "did you mean train.seq_len?"),
        ("num_hidden_layers", "did you mean model.num_hidden_layers?"),
        ("vocab_size", "did you mean tokenizer.vocab_size or model.vocab_size?"),
        ("model.beam_width", "known: preset, hidden_size, "),
        ("track.every", "did you mean log_every?"),
        ("train.num_experts", "did you mean model.moe.num_experts?"),
        ("tokenizer.custom_pattern", "did you mean pattern?"),
        ("parallel.offload_dir", "did you mean offload?"),
        ("train.objective.grpo.max_answer_tokens", "did you mean train.objective.max_answer_tokens?"),
        ("train.objective.grpo.endpoint_model", "did you mean endpoint?"),
        ("train.guard.min_loss_change", "known: policy, threshold, "),
    ],
)
def test_a_key_of_another_level_is_suggested(key: str, hint: str) -> None:
    [said] = mistakes("train: {epochs: 1}", f"{key}=5")
    assert said.startswith(f"command line, {key}=5")
    assert hint in said
    nested = yaml.safe_dump(replaced({"train": {"epochs": 1}}, key, 5))
    assert any(hint in one for one in mistakes(nested))


def test_a_suggested_key_of_another_level_is_not_missing_as_well() -> None:
    [said] = mistakes("{steps: 5, train: {seq_len: 512}}")
    assert said == "line 1, steps: no such key (did you mean train.steps?)"


def test_a_length_that_is_null_on_the_command_line_does_not_replace_another() -> None:
    assert parse_recipe("train: {tokens: 10M}", ["train.steps=5", "train.tokens=null"]).train.steps == 5
