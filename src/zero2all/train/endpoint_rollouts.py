"""Answers sampled by a server, in place of the model of the trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from zero2all.endpoint import Endpoint
from zero2all.errors import Z2aError
from zero2all.generation import Completion, SamplingParams
from zero2all.recipe.objective import GRPORecipe
from zero2all.tokenizer import Tokenizer
from zero2all.train.rollouts import Prompt

WORKERS = 4  # requests at the same time, each of several answers
MAX_ANSWERS = 16  # to one request
SEED_STRIDE = 1009  # between prompts
ROUNDING = 1e-3  # by which a log-probability may be above 0


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
        """``copies`` answers to each prompt; ``ping`` is called after each."""
        found = []
        with ThreadPoolExecutor(WORKERS) as pool:
            for group in pool.map(lambda prompt: self._ask(prompt, params, copies), prompts):
                found.append(group)
                ping()
        return found

    def _ask(self, prompt: Prompt, params: SamplingParams, copies: int) -> list[Completion]:
        """In parts, since servers limit the answers to one request. Equal prompts have seeds of their own."""
        parts = [min(MAX_ANSWERS, copies - first) for first in range(0, copies, MAX_ANSWERS)]
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
            raise Z2aError(f"the endpoint replies with {len(choices)} answers, not {copies}")
        return choices

    def _completion(self, choice: dict[str, Any], prompt: Prompt) -> Completion:
        tokens, logprobs = list(map(int, choice["token_ids"])), list(map(float, choice["logprobs"]["token_logprobs"]))
        if len(tokens) != len(logprobs) or not tokens or max(tokens) >= self._tokenizer.vocab_size or min(tokens) < 0:
            raise ValueError("token_ids and token_logprobs do not fit together or to the tokenizer")
        if not all(math.isfinite(logprob) and logprob < ROUNDING for logprob in logprobs):
            raise ValueError("token_logprobs are not log-probabilities")
        reason = "stop" if choice["finish_reason"] == "stop" else "length"
        return Completion(str(choice["text"]), tokens, logprobs, reason, prompt.tokens)  # type: ignore[arg-type]
