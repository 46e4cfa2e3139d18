"""Generation over ranks gives the tokens of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import on_ranks
from tests.runs import WIDE, train_run
from zero2all.base.errors import UsageError
from zero2all.generation import Completion, SamplingParams, generate_batch
from zero2all.model import Z2all
from zero2all.parallel import ParallelDims, ParallelMesh, ParallelModel
from zero2all.recipe import ModelConfig, ParallelRecipe
from zero2all.tokenizer import Tokenizer
from zero2all.train import Run

CONFIG = {**WIDE, "max_position_embeddings": 14, "tie_word_embeddings": True}
EXPERTS = {"moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}}
PROMPTS = ["the model", "", "春眠不觉晓"]
PARAMS = [
    SamplingParams(max_tokens=4, temperature=0),
    SamplingParams(max_tokens=100, top_k=0, top_p=0.9, repetition_penalty=1.1, stop=("e",), seed=3),
]
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
FOUR_LAYERS: dict[str, Any] = {**UNTIED, "num_hidden_layers": 4}
TWO_RANKS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tp": 2, "sp": False}, {}),
    ({"tp": 2, "sp": True}, {"final_logit_softcapping": 5.0}),
    ({"tp": 2, "sp": False}, EXPERTS),
    ({"pp": 2, "schedule": "1f1b"}, UNTIED),
    ({"pp": 2, "schedule": "zbv"}, FOUR_LAYERS),
    ({"pp": 2, "schedule": "interleaved"}, FOUR_LAYERS | EXPERTS),
    ({"dp_shard": 2, "ep": 2}, EXPERTS),
    ({"cp": 2}, {"sliding_window": 5, "full_attention_interval": 2}),
]
FOUR_RANKS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tp": 2, "pp": 2, "sp": True, "schedule": "1f1b"}, UNTIED),
    ({"tp": 2, "pp": 2, "sp": False, "schedule": "zbv"}, FOUR_LAYERS | EXPERTS),
    ({"tp": 2, "dp_shard": 2}, {}),
]
Result = tuple[str, list[int], str]


def config_for(tokenizer: Tokenizer, changes: dict[str, Any]) -> ModelConfig:
    return ModelConfig.model_validate({**CONFIG, "vocab_size": tokenizer.vocab_size, **changes})


def results(completions: list[Completion]) -> list[Result]:
    return [(completion.text, completion.tokens, completion.finish_reason) for completion in completions]


def generate_on_ranks(
    world: int, layouts: list[tuple[dict[str, Any], dict[str, Any]]], directory: Path
) -> list[list[list[Result]]]:
    tokenizer, found = Tokenizer(directory), []
    for sizes, changes in layouts:
        recipe = ParallelRecipe(**sizes)
        mesh = ParallelMesh(ParallelDims.from_recipe(recipe, world), torch.device("cpu"))
        model = ParallelModel(config_for(tokenizer, changes), recipe, mesh, seed=1)
        found.append([results(generate_batch(model, tokenizer, PROMPTS, params, batch_size=2)) for params in PARAMS])
        assert model.model.training
    return found


def generate_from_checkpoint(directory: Path, sizes: dict[str, int]) -> list[Result]:
    run = Run.open(directory)
    model = run.load_parallel_model(ParallelRecipe(**sizes)) if sizes else run.load_model()
    return results(generate_batch(model, run.tokenizer(), PROMPTS, PARAMS[0]))


def check(world: int, layouts: list[tuple[dict[str, Any], dict[str, Any]]], directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    expected = []
    for sizes, changes in layouts:
        # With sp the last position is padding.
        shorter = {"max_position_embeddings": 13} if sizes.get("sp", "tp" in sizes) else {}
        model = Z2all(config_for(tokenizer, {**changes, **shorter})).init_weights(1).eval()
        expected.append([results(generate_batch(model, tokenizer, PROMPTS, params)) for params in PARAMS])
    assert any(reason == "stop" for _, _, reason in expected[0][1])
    found = on_ranks(world, generate_on_ranks, world, layouts, directory, detail=False)
    for (sizes, changes), *own, one_process in zip(layouts, *found, expected, strict=True):
        for rank, completions in enumerate(own):
            assert completions == one_process, f"rank {rank} of {sizes} {changes}"


def test_two_ranks_generate_what_one_process_does(workspace: Path) -> None:
    check(2, TWO_RANKS, workspace / "tokenizer")


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"tp": 2, "dp_shard": 1}, {"pp": 2, "dp_shard": 1}], ids=str)
def test_a_checkpoint_generates_the_same_over_ranks(sizes: dict[str, int], workspace: Path, tmp_path: Path) -> None:
    run = train_run(workspace, tmp_path, "train.steps=4", "model.tie_word_embeddings=false")
    expected = generate_from_checkpoint(run.directory, {})
    assert on_ranks(2, generate_from_checkpoint, run.directory, sizes, detail=False) == [expected, expected]


@pytest.mark.parametrize(("tp", "said"), [(4, "num_key_value_heads"), (2, "there are 1")])
def test_an_impossible_layout_is_refused(tp: int, said: str, tiny_run: Run) -> None:
    with pytest.raises(UsageError, match=said):
        tiny_run.load_parallel_model(ParallelRecipe(tp=tp, dp_shard=1))


@pytest.mark.long
def test_four_ranks_generate_what_one_process_does(workspace: Path) -> None:
    check(4, FOUR_RANKS, workspace / "tokenizer")
