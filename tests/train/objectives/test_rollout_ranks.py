"""Each data-parallel rank answers its own prompts, and trains on its own answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny_recipe
from tests.ranks import on_ranks
from zero2all.checkpoint.rank_tree import RankTree
from zero2all.corpus import build_corpus
from zero2all.generation import SamplingParams
from zero2all.parallel import ParallelDims, ParallelMesh, ParallelModel
from zero2all.recipe import ModelConfig, ParallelRecipe, Recipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import build_tokens
from zero2all.track import read_steps
from zero2all.train import train
from zero2all.train.objectives import grpo_step as grpo_objective
from zero2all.train.objectives import rollouts
from zero2all.train.objectives.rollouts import Prompt, sample_completions

SEQ_LEN, GROUP, STEPS = 64, 4, 2
TOLERANCE = 1e-4
REWARDED: list[str] = []


def vowels(prompt: str, answer: str, reference: str) -> float:
    REWARDED.append(prompt)
    return sum(letter in "aeiou" for letter in answer) / max(1, len(answer))


@pytest.fixture(scope="module")
def grpo(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Of the prompts, many are the same."""
    out = tmp_path_factory.mktemp("grpo")
    messages = [[{"role": "user", "content": f"q {number % 2}"}, {"role": "assistant", "content": f"answer {number}"}]
                for number in range(60)]  # fmt: skip
    (out / "chat.jsonl").write_text("\n".join(json.dumps({"messages": one}) for one in messages), encoding="utf-8")
    sources = [{"name": "chat", "kind": "chat", "paths": [f"{out}/chat.jsonl"]}]
    recipe = tiny_recipe(
        workspace, f"out={out}", f"corpus.sources={json.dumps(sources)}", "corpus.dir=null", "tokens.dir=null",
        "train.objective.name=grpo", f"train.seq_len={SEQ_LEN}", f"train.steps={STEPS}", "evals.every=null",
        "train.objective.max_answer_tokens=12", f"train.objective.grpo={{group_size: {GROUP}, mask_truncated: false, "
        "rewards: ['tests.train.objectives.test_rollout_ranks:vowels']}",
        f"train.micro_batch_tokens={SEQ_LEN}", "train.optimizer.lr=1e-3",
    )  # fmt: skip
    build_corpus(recipe.corpus, recipe.documents_dir)
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)
    return recipe


def train_and_count(recipe: Recipe) -> dict[str, Any]:
    """What this rank read, generated, rewarded and received in each step."""
    counts: dict[str, list[int]] = {"read": [], "generated": [], "rewarded": [], "received": []}
    generate, read, begin = rollouts.generate_batch, grpo_objective.read_prompt, grpo_objective.GRPOObjective.begin
    count_received = RankTree._counted
    received, prompts, answers = 0, list[int](), list[tuple[int, ...]]()

    def counted(self: RankTree, payload: Any) -> bytes:
        nonlocal received
        received += len(payload)
        return count_received(self, payload)

    def count_read(*args: Any) -> Prompt:
        prompts.append(1)
        return read(*args)

    def count_generated(model: Any, tokenizer: Any, texts: Sequence[Any], *args: Any, **options: Any) -> Any:
        counts["generated"].append(len(texts))
        found = generate(model, tokenizer, texts, *args, **options)
        answers.extend(tuple(one.tokens) for one in found)
        return found

    def count_step(*args: Any) -> Any:
        before, prompts[:], REWARDED[:] = received, [], []
        loss = begin(*args)
        counts["received"].append(received - before)
        counts["read"].append(len(prompts))
        counts["rewarded"].append(len(REWARDED))
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankTree, "_counted", counted)
        patch.setattr(rollouts, "generate_batch", count_generated)
        patch.setattr(grpo_objective, "read_prompt", count_read)
        patch.setattr(grpo_objective.GRPOObjective, "begin", count_step)
        train(recipe)
    return {**counts, "answers": answers}


def metrics(recipe: Recipe) -> list[float]:
    steps = read_steps(recipe.run_dir / "record.jsonl").values()
    return [values[name] for values in steps for name in ("loss", "grad_norm", "reward", "reward_std", "answer_length")]


def layout_recipe(grpo: Recipe, out: Path, prompts: int, **parallel: int) -> Recipe:
    places = {
        name: getattr(grpo, name).model_copy(update={"dir": getattr(grpo, f"{name}_dir")})
        for name in ("tokens", "tokenizer")
    }
    train = grpo.train.model_copy(update={"batch_tokens": prompts * SEQ_LEN})
    return grpo.model_copy(update={"out": out, "parallel": ParallelRecipe(**parallel), "train": train, **places})


@pytest.mark.parametrize(("prompts", "dp", "tp"), [(1, 2, 2), pytest.param(3, 4, 1, marks=pytest.mark.long)])
def test_ranks_share_the_prompts_and_train_as_one_process(
    prompts: int, dp: int, tp: int, grpo: Recipe, tmp_path: Path
) -> None:
    """One data-parallel rank has no prompt."""
    alone = layout_recipe(grpo, tmp_path / "one", prompts)
    expected = train_and_count(alone)
    recipe = layout_recipe(grpo, tmp_path / "out", prompts, dp_shard=dp, tp=tp)
    found = on_ranks(4, train_and_count, recipe, detail=False)
    shares = [prompts * (rank // tp + 1) // dp - prompts * (rank // tp) // dp for rank in range(4)]
    assert 0 in shares
    for rank, (counts, share) in enumerate(zip(found, shares, strict=True)):
        assert counts["read"] == [share] * STEPS, rank
        assert counts["generated"] == [share * GROUP] * STEPS, rank
        assert counts["rewarded"] == [share * GROUP if rank % tp == 0 else 0] * STEPS, rank
        assert max(counts["received"]) < (2000 if rank == 0 else 800), "totals and rewards, but no answers"
    answers = sorted(answer for rank in range(0, 4, tp) for answer in found[rank]["answers"])
    assert answers == sorted(expected["answers"])
    assert metrics(recipe) == pytest.approx(metrics(alone), abs=TOLERANCE)


def test_equal_prompts_have_the_same_answers_however_they_are_divided(workspace: Path) -> None:
    tokenizer = Tokenizer(workspace / "tokenizer")
    config = ModelConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=tokenizer.vocab_size, max_position_embeddings=64,
    )  # fmt: skip
    recipe = ParallelRecipe()
    mesh = ParallelMesh(ParallelDims.from_recipe(recipe, 1), torch.device("cpu"))
    model = ParallelModel(config, recipe, mesh, seed=0)
    prompts = [Prompt([10, 11, 12], "", "", number) for number in range(4)]
    params = SamplingParams(12, temperature=1.0, top_k=0, seed=5)

    def sample(part: list[Prompt]) -> list[tuple[int, ...]]:
        groups = sample_completions(model, tokenizer, part, params, 2, lambda: None)
        return [tuple(one.tokens) for group in groups for one in group]

    together = sample(prompts)
    assert len(set(together)) == 8
    for ranks in (2, 4):
        size = len(prompts) // ranks
        divided = [answer for first in range(0, 4, size) for answer in sample(prompts[first : first + size])]
        assert divided == together
