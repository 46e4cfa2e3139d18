"""GRPO: sampled answers, their advantages, and that trainer and sampler agree."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoint.helpers import losses
from tests.conftest import tiny_recipe
from tests.train.test_kill import run_trainer
from zero2all.base.errors import RecipeError, UsageError, Z2aError
from zero2all.corpus import build_corpus
from zero2all.recipe import Recipe, parse_recipe, recipe_yaml
from zero2all.recipe.objective import GRPORecipe
from zero2all.tokens import build_tokens
from zero2all.track import read_steps
from zero2all.train import Run, train
from zero2all.train.objectives.grpo import RolloutBatch, group_advantages, grpo_losses
from zero2all.train.objectives.rollouts import load_rewards

SEQ_LEN = 64


def many_vowels(prompt: str, answer: str, reference: str) -> float:
    """The share of vowels."""
    return sum(letter in "aeiou" for letter in answer) / max(1, len(answer))


def broken(prompt: str, answer: str, reference: str) -> float:
    raise ValueError("no idea")


def endless(prompt: str, answer: str, reference: str) -> float:
    return float("nan")


def knows_the_reference(prompt: str, answer: str, reference: str) -> float:
    assert prompt.endswith("<|im_start|>assistant\n"), prompt
    assert reference.startswith("answer "), reference
    return float(len(answer) % 2)


@pytest.fixture(scope="module")
def grpo(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    base = tiny_recipe(workspace, f"out={tmp_path_factory.mktemp('base')}", "train.steps=4", f"train.seq_len={SEQ_LEN}")
    train(base)
    out, rng = tmp_path_factory.mktemp("grpo"), random.Random(5)
    records = [
        {"messages": [{"role": "user", "content": f"q {rng.randint(0, 999)}"},
                      {"role": "assistant", "content": f"answer {number}"}]}
        for number in range(60)
    ]  # fmt: skip
    (out / "chat.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    sources = [{"name": "chat", "kind": "chat", "paths": [f"{out}/chat.jsonl"]}]
    recipe = tiny_recipe(
        workspace, f"out={out}", f"corpus.sources={json.dumps(sources)}", "corpus.dir=null", "tokens.dir=null",
        f"train.init={base.run_dir}", "train.objective.name=grpo", f"train.seq_len={SEQ_LEN}", "train.steps=4",
        "train.objective.max_answer_tokens=12", "train.objective.grpo={group_size: 4, mask_truncated: false, "
        "rewards: ['tests.train.objectives.test_grpo:many_vowels']}",
        "train.batch_tokens=256", "train.micro_batch_tokens=128", "train.optimizer.lr=1e-3",
    )  # fmt: skip
    build_corpus(recipe.corpus, recipe.documents_dir)
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)
    return recipe


def elsewhere(recipe: Recipe, out: Path, max_answer_tokens: int = 12, **options: object) -> Recipe:
    places = {
        name: getattr(recipe, name).model_copy(update={"dir": getattr(recipe, f"{name}_dir")})
        for name in ("tokens", "tokenizer")
    }
    grpo = recipe.train.objective.grpo.model_copy(update=options)
    objective = recipe.train.objective.model_copy(update={"grpo": grpo, "max_answer_tokens": max_answer_tokens})
    return recipe.model_copy(
        update={"out": out, "train": recipe.train.model_copy(update={"objective": objective}), **places}
    )


def steps_of(recipe: Recipe) -> dict[int, dict[str, float]]:
    return read_steps(recipe.run_dir / "record.jsonl")


def test_sampler_and_trainer_agree_and_metrics_are_recorded(grpo: Recipe, tmp_path: Path) -> None:
    recipe = elsewhere(grpo, tmp_path, rewards=["tests.train.objectives.test_grpo:knows_the_reference"])
    train(recipe)
    for values in steps_of(recipe).values():
        assert values["sampler_gap"] < 1e-5
        assert 0 <= values["reward"] <= 1
        assert 1 <= values["answer_length"] <= 12
        assert {"reward_std", "groups_without_spread", "truncated_answers"} <= set(values)
    first = steps_of(recipe)[0]
    assert abs(first["loss"]) < 1  # advantages cancel, up to the lengths of answers


def test_micro_batches_do_not_change_the_steps(grpo: Recipe, tmp_path: Path) -> None:
    runs = []
    for name, micro in (("one", None), ("many", SEQ_LEN)):
        recipe = elsewhere(grpo, tmp_path / name)
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"micro_batch_tokens": micro})})
        train(recipe)
        runs.append([value for values in steps_of(recipe).values() for value in (values["loss"], values["reward"])])
    assert runs[0] == pytest.approx(runs[1], abs=1e-5)


def test_truncated_answers_do_not_count(grpo: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With one token each, nothing is left to learn from."""
    recipe = elsewhere(grpo, tmp_path, mask_truncated=True, max_answer_tokens=1)
    train(recipe)
    assert all(values["truncated_answers"] > 0.9 for values in steps_of(recipe).values())
    all_cut = [values for values in steps_of(recipe).values() if values["truncated_answers"] == 1]
    assert all_cut
    assert all(values["loss"] == 0 == values["grad_norm"] for values in all_cut)
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.count("learns nothing: all completions were cut at 1 tokens") == 1
    assert "raise train.objective.max_answer_tokens" in printed


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tests.train.objectives.test_grpo:broken", "reward function .*:broken failed on the completion .*no idea"),
        ("tests.train.objectives.test_grpo:endless", "reward function .*:endless returned nan"),
    ],
)
def test_a_reward_that_fails_is_named(grpo: Recipe, name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(Z2aError, match=reason):
        train(elsewhere(grpo, tmp_path, rewards=[name]))


def test_rewards_are_functions_of_modules() -> None:
    with pytest.raises(UsageError, match="cannot be loaded"):
        load_rewards(["nowhere.at.all:reward"])
    with pytest.raises(UsageError, match="is not a function"):
        load_rewards(["zero2all.base.units:__name__"])
    with pytest.raises(RecipeError, match="needs at least one reward function"):
        parse_recipe("train: {steps: 1, objective: {name: grpo}}")


def test_advantages_are_relative_to_the_group() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5]])
    advantages = group_advantages(rewards, GRPORecipe(rewards=["a:b"]))
    assert advantages.sum(1).abs().max() < 1e-5
    assert advantages[1].abs().max() == 0
    expected = (rewards[0] - 0.5) / (rewards[0].std() + 1e-4)
    assert torch.allclose(advantages[0], expected)


def test_an_answer_that_the_sampler_found_unlikely_is_capped() -> None:
    recipe, zeros, ones = GRPORecipe(rewards=["a:b"], importance_cap=2.0), torch.zeros(1, 2), torch.ones(1, 2)
    logps = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    rollouts = RolloutBatch(ones, ones, zeros + torch.tensor([[-1.0, -9.0]]), ones)
    grpo_losses(logps, rollouts, recipe).sum().backward()
    assert logps.grad is not None
    assert logps.grad[0].tolist() == pytest.approx([-1.0, -2.0])


@pytest.mark.slow
@pytest.mark.long
def test_sigkill_and_resume_repeats_the_same_rollouts(grpo: Recipe, tmp_path: Path) -> None:
    paths = {}
    for name in ("uninterrupted", "killed"):
        recipe = elsewhere(grpo, tmp_path / name)
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 9})})
        recipe.out.mkdir()
        paths[name] = recipe
        (recipe.out / "recipe.yaml").write_text(recipe_yaml(recipe.model_copy(update={
            "checkpoint": recipe.checkpoint.model_copy(update={"every": recipe.checkpoint.every.__class__(7, "steps")})
        })))  # fmt: skip
    assert run_trainer(paths["uninterrupted"].out / "recipe.yaml", 9)[0] == 0
    assert run_trainer(paths["killed"].out / "recipe.yaml", 8)[0] == -signal.SIGKILL
    assert run_trainer(paths["killed"].out / "recipe.yaml", 9)[0] == 0
    one, other = (losses(Run.open(recipe.run_dir)) for recipe in paths.values())
    assert one == other
    rewards = [[values["reward"] for values in steps_of(recipe).values()] for recipe in paths.values()]
    assert np.array_equal(*rewards)


def test_answers_may_come_from_a_server(grpo: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the initial weights: there is no gap at the first step, and a growing one after."""
    pytest.importorskip("uvicorn", reason="the server is not installed")
    from tests.generation.serve.servers import KEY, serve
    from zero2all.generation.serve.api_answers import ServedModel
    from zero2all.generation.serve.engine import ServingEngine

    assert grpo.train.init is not None
    base = Run.open(grpo.train.init)
    engine = ServingEngine(base.load_model(), base.tokenizer(), rows=8, max_waiting=256)
    monkeypatch.setenv("Z2A_API_KEY", KEY)
    with serve(engine, ServedModel("base", base.tokenizer(), None)) as server:
        recipe = elsewhere(grpo, tmp_path / "run", endpoint=f"{server.url}/v1")
        train(recipe)
        wrong = elsewhere(grpo, tmp_path / "wrong", endpoint=f"{server.url}/v2")
        with pytest.raises(Z2aError, match="HTTP 404"):
            train(wrong)
    gaps = [values["sampler_gap"] for values in steps_of(recipe).values()]
    assert gaps[0] < 1e-4
    assert gaps[-1] > 1e-3
    assert engine.stats.completed > 0
