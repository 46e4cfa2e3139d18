"""Answers to prompts with their rewards, sampled by the model of the trainer or by a server."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.network.openai_client import Endpoint
from zero2all.base.plugins import BoundPlugin, PluginSpec, bind
from zero2all.checkpoint import RankGroup
from zero2all.generation import Completion, SamplingParams, generate_batch
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.parallel.mesh import shard_range
from zero2all.recipe.objective import GRPORecipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens.token_store import Array

Reward = Callable[[str, str, str], float]
"""The reward for a prompt, a completion and the reference answer."""
WORKERS = 4  # requests to a server at the same time, each of several completions
MAX_COMPLETIONS = 16  # to one request
SEED_STRIDE = 1009  # between prompts
ROUNDING = 1e-3  # by which a log-probability may be above 0


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    text: str
    """What the template makes of the conversation so far."""
    reference: str
    """The completion of the conversation."""
    number: int = 0
    """Its place in the global batch: equal prompts have different completions, on whichever ranks they are."""


@dataclass(frozen=True)
class Rollout:
    """A sampled completion."""

    prompt: Prompt
    completion: Completion
    reward: float

    @property
    def truncated(self) -> bool:
        return self.completion.finish_reason == "length"


@dataclass(frozen=True)
class RolloutTotals:
    """Sums over prompts and completions: of one rank, or of all that read different samples."""

    prompts: int = 0
    completions: int = 0
    counted_tokens: int = 0
    """Tokens of completions that the loss counts."""
    tokens: int = 0
    truncated: int = 0
    reward: float = 0.0
    reward_std: float = 0.0
    """Over prompts, of the standard deviation of each."""
    without_spread: int = 0
    """Prompts whose completions all have the same reward."""
    most_rows: int = 0
    """The largest number of packed rows of a rank."""

    def __add__(self, other: RolloutTotals) -> RolloutTotals:
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return RolloutTotals(**sums | {"most_rows": max(self.most_rows, other.most_rows)})

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "reward": self.reward / self.completions,
            "reward_std": self.reward_std / self.prompts,
            "groups_without_spread": self.without_spread / self.prompts,
            "answer_length": self.tokens / self.completions,
            "truncated_answers": self.truncated / self.completions,
        }


def total_rollouts(groups: Sequence[Sequence[Rollout]], *, mask_truncated: bool, rows: int = 0) -> RolloutTotals:
    """The totals of one rank, whose completions are packed in ``rows`` rows."""
    completions = [one for group in groups for one in group]
    rewards = np.array([one.reward for one in completions]).reshape(len(groups), len(groups[0]) if groups else 1)
    return RolloutTotals(
        prompts=len(groups),
        completions=len(completions),
        counted_tokens=sum(len(one.completion.tokens) for one in completions if not (one.truncated and mask_truncated)),
        tokens=sum(len(one.completion.tokens) for one in completions),
        truncated=sum(one.truncated for one in completions),
        reward=float(rewards.sum()),
        reward_std=float(rewards.std(axis=1, ddof=1).sum()) if rewards.shape[1] > 1 else 0.0,
        without_spread=int((np.ptp(rewards, axis=1) == 0).sum()) if len(completions) else 0,
        most_rows=rows,
    )


class RolloutRanks:
    """Which ranks sample for which prompts: each data-parallel rank its own, together with the ranks that it shares the
    model with."""

    def __init__(self, mesh: ParallelMesh, ranks: RankGroup) -> None:
        self.mesh, self.all, self.peers = mesh, ranks, RankGroup(mesh.peers)

    def sum(self, totals: Callable[[], RolloutTotals]) -> RolloutTotals:
        """Over all prompts, each of which counts once."""
        return self.all.reduce(lambda: totals() if self.peers.rank == 0 else RolloutTotals(), RolloutTotals.__add__)

    def share(self, count: int) -> range:
        """This rank's part of ``count`` items."""
        return range(*shard_range(count, self.mesh.dp_rank, self.mesh.dims.dp))


def load_rewards(specs: Sequence[PluginSpec]) -> list[BoundPlugin]:
    """The functions that a recipe names."""
    try:
        return [bind("reward", spec) for spec in specs]
    except UsageError as error:
        raise UsageError(f"train.objective.grpo.rewards: {error}") from error


def read_prompt(tokens: Array, mask: Array, tokenizer: Tokenizer, number: int = 0) -> Prompt:
    """A conversation up to its last completion; ``mask`` marks what the assistant writes."""
    ends = np.flatnonzero(mask)
    before = np.flatnonzero(~mask[: ends[-1]])
    first = int(before[-1]) + 1 if len(before) else 0
    completion = tokens[first : ends[-1] + 1].tolist()
    completion = [token for token in completion if token not in tokenizer.stop_token_ids]
    prompt = tokens[:first].tolist()
    return Prompt(prompt, tokenizer.decode(prompt), tokenizer.decode(completion), number)


def sample_completions(
    model: ParallelModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    copies: int,
    ping: Callable[[], None],
) -> list[list[Completion]]:
    """``copies`` completions to each of this rank's prompts; every rank calls it, with prompts or without.

    A completion depends on the weights, the seed, its prompt and that prompt's number, not on how prompts are divided.
    """
    repeated = [one.tokens for one in prompts for _ in range(copies)]
    numbers = [one.number * copies + copy for one in prompts for copy in range(copies)]
    flat = generate_batch(model, tokenizer, repeated, params, on_step=ping, occurrences=numbers)
    return [flat[first : first + copies] for first in range(0, len(flat), copies)]


def score_rollouts(
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Completion]],
    rewards: Sequence[Reward],
    peers: RankGroup,
    ping: Callable[[], None],
) -> list[list[Rollout]]:
    """``peers`` are the ranks with the same prompts: the first computes, since a function may use randomness, time or a
    service."""

    def reward_of(prompt: Prompt, completion: str) -> float:
        ping()
        return sum(_reward(function, prompt, completion, prompt.reference) for function in rewards)

    def compute() -> list[list[float]]:
        return [
            [reward_of(prompt, one.text) for one in completions]
            for prompt, completions in zip(prompts, groups, strict=True)
        ]

    values = peers.on_rank0(compute, ping)
    return [
        [Rollout(prompt, one, reward) for one, reward in zip(completions, of_prompt, strict=True)]
        for prompt, completions, of_prompt in zip(prompts, groups, values, strict=True)
    ]


def _reward(function: Reward, prompt: Prompt, completion: str, reference: str) -> float:
    name = function.name if isinstance(function, BoundPlugin) else getattr(function, "__name__", str(function))
    try:
        value = float(function(prompt.text, completion, reference))
    except Exception as error:
        raise Z2aError(f"reward function {name} failed on the completion {completion[:200]!r}: {error}") from error
    if not np.isfinite(value):
        raise Z2aError(f"reward function {name} returned {value} for the completion {completion[:200]!r}")
    return value


def sampling_params(max_tokens: int, seed: int) -> SamplingParams:
    """From the model as it is: any filter would make sampler and trainer disagree."""
    return SamplingParams(max_tokens, temperature=1.0, top_k=0, seed=seed)


class EndpointSampler:
    """
    >>> EndpointSampler(recipe.train.objective.grpo, tokenizer).sample(prompts, params, copies=8)
    """

    def __init__(self, recipe: GRPORecipe, tokenizer: Tokenizer) -> None:
        assert recipe.endpoint is not None
        self._endpoint, self._tokenizer = Endpoint(recipe.endpoint), tokenizer

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, copies: int, ping: Callable[[], None]
    ) -> list[list[Completion]]:
        """``copies`` completions to each prompt; ``ping`` is called after each."""
        found = []
        with ThreadPoolExecutor(WORKERS) as pool:
            for group in pool.map(lambda prompt: self._ask(prompt, params, copies), prompts):
                found.append(group)
                ping()
        return found

    def _ask(self, prompt: Prompt, params: SamplingParams, copies: int) -> list[Completion]:
        """In parts, since servers limit the completions to one request. Equal prompts have seeds of their own."""
        parts = [min(MAX_COMPLETIONS, copies - first) for first in range(0, copies, MAX_COMPLETIONS)]
        first_seed = params.seed + SEED_STRIDE * prompt.number
        found = [self._post(prompt, params, count, first_seed + number) for number, count in enumerate(parts)]
        return [one for part in found for one in part]

    def _post(self, prompt: Prompt, params: SamplingParams, copies: int, seed: int) -> list[Completion]:
        body = {
            "prompt": prompt.tokens,
            "n": copies,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "logprobs": 0,
            "seed": seed,
            "return_token_ids": True,
        }
        reply = self._endpoint.post("completions", body)
        try:
            choices = [self._completion(choice, prompt) for choice in reply["choices"]]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise Z2aError(
                f"the endpoint replies without token_ids or logprobs ({error}): use z2a serve or vLLM"
            ) from error
        if len(choices) != copies:
            raise Z2aError(f"the endpoint replies with {len(choices)} completions, not {copies}")
        return choices

    def _completion(self, choice: dict[str, Any], prompt: Prompt) -> Completion:
        tokens, logprobs = list(map(int, choice["token_ids"])), list(map(float, choice["logprobs"]["token_logprobs"]))
        if len(tokens) != len(logprobs) or not tokens or max(tokens) >= self._tokenizer.vocab_size or min(tokens) < 0:
            raise ValueError("token_ids and token_logprobs do not fit together or to the tokenizer")
        if not all(math.isfinite(logprob) and logprob < ROUNDING for logprob in logprobs):
            raise ValueError("token_logprobs are not log-probabilities")
        reason = "stop" if choice["finish_reason"] == "stop" else "length"
        return Completion(str(choice["text"]), tokens, logprobs, reason, prompt.tokens)  # type: ignore[arg-type]
