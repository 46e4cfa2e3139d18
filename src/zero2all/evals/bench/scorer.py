"""What benchmarks need of a model: scores of continuations, and generated text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zero2all.evals.log_likelihood import Score, encode_pair, score
from zero2all.evals.target import EvalTarget
from zero2all.generation import SamplingParams, generate_batch


class Scorer(Protocol):
    """A model, or a stand-in for one in tests."""

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Score | None]:
        """Of each continuation after its context; None if the continuation is longer than the model's context."""
        ...

    def generate(self, prompts: Sequence[str], max_tokens: int, stop: tuple[str, ...]) -> list[str]:
        """The greedy continuation of each prompt."""
        ...


class ModelScorer:
    """Scores and generates with the model of a target."""

    def __init__(self, target: EvalTarget) -> None:
        self.target = target

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Score | None]:
        limit = self.target.model.config.max_position_embeddings
        requests = [encode_pair(self.target.tokenizer, context, continuation) for context, continuation in pairs]
        fitting = [request for request in requests if len(request.continuation) <= limit]
        scores = iter(score(self.target.model, fitting))
        return [next(scores) if len(request.continuation) <= limit else None for request in requests]

    def generate(self, prompts: Sequence[str], max_tokens: int, stop: tuple[str, ...]) -> list[str]:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, stop=stop)
        completions = generate_batch(self.target.model, self.target.tokenizer, prompts, params)
        return [completion.text for completion in completions]
