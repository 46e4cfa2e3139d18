"""Answers that the model samples to prompts, with their rewards."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zero2all.checkpoint import RankGroup
from zero2all.errors import UsageError, Z2aError
from zero2all.generation import Completion, SamplingParams, generate_batch
from zero2all.parallel import ParallelModel
from zero2all.parallel.mesh import shard_range
from zero2all.recipe import Mistake, Recipe
from zero2all.recipe.objective import GRPORecipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens.token_store import Array

Reward = Callable[[str, str, str], float]
"""Of a prompt, an answer and the reference answer."""


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    text: str
    """What the template makes of the conversation so far."""
    reference: str
    """The answer of the conversation."""


@dataclass(frozen=True)
class Rollout:
    """A sampled answer."""

    prompt: Prompt
    completion: Completion
    reward: float

    @property
    def truncated(self) -> bool:
        return self.completion.finish_reason == "length"


def load_rewards(names: Sequence[str]) -> list[Reward]:
    """The functions that a recipe names."""
    try:
        return [_load_reward(name) for name in names]
    except UsageError as error:
        raise UsageError(f"train.objective.grpo.rewards: {error}") from error


def reward_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """What is wrong with the functions that a recipe names. Their modules are imported; nothing is called."""
    for number, name in enumerate(recipe.train.objective.grpo.rewards):
        try:
            _load_reward(name)
        except UsageError as error:
            yield Mistake(str(error), (f"train.objective.grpo.rewards.{number}",))


def _load_reward(name: str) -> Reward:
    module, _, attribute = name.partition(":")
    try:
        target: Any = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # importing runs the module's code
        raise UsageError(f"{name} cannot be imported ({type(error).__name__}: {error})") from error
    if not callable(target):
        raise UsageError(f"{name} is not a function")
    return target  # type: ignore[no-any-return]


def read_prompt(tokens: Array, mask: Array, tokenizer: Tokenizer) -> Prompt:
    """A conversation up to its last answer; ``mask`` marks what the assistant writes."""
    ends = np.flatnonzero(mask)
    before = np.flatnonzero(~mask[: ends[-1]])
    first = int(before[-1]) + 1 if len(before) else 0
    answer = tokens[first : ends[-1] + 1].tolist()
    answer = [token for token in answer if token not in tokenizer.stop_token_ids]
    prompt = tokens[:first].tolist()
    return Prompt(prompt, tokenizer.decode(prompt), tokenizer.decode(answer))


def sample_answers(
    model: ParallelModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    copies: int,
    ranks: RankGroup,
    ping: Callable[[], None],
) -> list[list[Completion]]:
    """``copies`` answers to each prompt; every rank gets all of them. Ranks with the full model share the prompts."""
    if not model.is_replicated or model.mesh.dims.world_size == 1:
        return _sample(model, tokenizer, prompts, params, copies, ping)
    mesh = model.mesh
    first, last = shard_range(len(prompts), mesh.dp_rank, mesh.dims.dp)
    parts = ranks.on_all_ranks(lambda: _sample(model, tokenizer, prompts[first:last], params, copies, ping), ping)
    return [group for part in parts for group in part]


def _sample(
    model: ParallelModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    copies: int,
    ping: Callable[[], None],
) -> list[list[Completion]]:
    repeated = [one.tokens for one in prompts for _ in range(copies)]
    flat = generate_batch(model, tokenizer, repeated, params, on_step=ping)
    return [flat[first : first + copies] for first in range(0, len(flat), copies)]


def score_rollouts(
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Completion]],
    rewards: Sequence[Reward],
    ranks: RankGroup,
    ping: Callable[[], None],
) -> list[list[Rollout]]:
    """Rewards are computed on rank 0: a function may use randomness, time or a service."""

    def reward_of(prompt: Prompt, answer: str) -> float:
        ping()
        return sum(_reward(function, prompt, answer, prompt.reference) for function in rewards)

    def compute() -> list[list[float]]:
        return [
            [reward_of(prompt, one.text) for one in completions]
            for prompt, completions in zip(prompts, groups, strict=True)
        ]

    values = ranks.on_rank0(compute, ping)
    return [
        [Rollout(prompt, one, reward) for one, reward in zip(completions, of_prompt, strict=True)]
        for prompt, completions, of_prompt in zip(prompts, groups, values, strict=True)
    ]


def _reward(function: Reward, prompt: Prompt, answer: str, reference: str) -> float:
    name = getattr(function, "__name__", str(function))
    try:
        value = float(function(prompt.text, answer, reference))
    except Exception as error:
        raise Z2aError(f"reward function {name} failed on the answer {answer[:200]!r}: {error}") from error
    if not np.isfinite(value):
        raise Z2aError(f"reward function {name} returned {value} for the answer {answer[:200]!r}")
    return value


def sampling_params(recipe: GRPORecipe, seed: int) -> SamplingParams:
    """From the model as it is: any filter would make sampler and trainer disagree."""
    return SamplingParams(recipe.max_answer_tokens, temperature=1.0, top_k=0, seed=seed)
