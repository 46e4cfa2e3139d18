"""Sampling distributions are those of their definition, and filters those of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from zero2all.base.errors import UsageError
from zero2all.generation import SamplingParams
from zero2all.generation.sampling import candidates, choose_tokens, penalize

DRAWS = 40_000


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def filtered(logits_BV: Tensor, params: SamplingParams) -> Tensor:
    """Logits of the full vocabulary, normalized, -inf where a token cannot be sampled."""
    logits_BC, ids_BC = candidates(logits_BV, params)
    full = logits_BC if ids_BC is None else torch.full_like(logits_BV, -math.inf).scatter(1, ids_BC, logits_BC)
    return full.log_softmax(-1)


def exact_probs(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """From the definition, one token after another, in double precision."""
    probs = (logits_V.double() / params.temperature).softmax(-1)
    order = probs.argsort(descending=True).tolist()
    if params.top_k:
        order = order[: params.top_k]
    total = sum(float(probs[token]) for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass >= params.top_p or probs[token] < params.min_p * probs[order[0]]:
            break
        kept.append(token)
        mass += float(probs[token]) / total
    exact = torch.zeros_like(probs)
    exact[kept] = probs[kept]
    return exact / exact.sum()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 2.0, "min_p": 0.1},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_samples_are_distributed_as_defined(options: dict[str, Any]) -> None:
    """Pearson's chi-square: with the right distribution its mean is the degrees of freedom, its variance twice that."""
    params = SamplingParams(**{"top_k": 0, **options})
    logits = random_logits(1, 24) / 2
    uniforms = torch.rand(DRAWS, generator=torch.Generator().manual_seed(1))
    tokens = choose_tokens(logits.expand(DRAWS, -1), params, uniforms, None)
    exact = exact_probs(logits[0], params)
    counts = torch.bincount(tokens, minlength=24).double()
    assert counts[exact == 0].sum() == 0
    expected = exact * DRAWS
    # Pooled, as the test needs an expected count of at least 5 in every cell.
    rare = (expected < 5) & (exact > 0)
    common = expected >= 5
    cells = [(counts[common], expected[common])]
    if expected[rare].sum() >= 5:
        cells.append((counts[rare].sum()[None], expected[rare].sum()[None]))
    observed, wanted = (torch.cat(column) for column in zip(*cells, strict=True))
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    assert freedom >= 3
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


def test_filters_are_those_of_transformers() -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = random_logits(16, 300, seed=2)
    for params, theirs in (
        (SamplingParams(temperature=0.7, top_k=0), []),
        (SamplingParams(temperature=0.7, top_k=20), [processors.TopKLogitsWarper(20)]),
        (SamplingParams(temperature=0.7, top_k=1000), [processors.TopKLogitsWarper(1000)]),
        (SamplingParams(temperature=0.7, top_k=0, top_p=0.9), [processors.TopPLogitsWarper(0.9)]),
        (SamplingParams(temperature=0.7, top_k=0, top_p=1e-4), [processors.TopPLogitsWarper(1e-4)]),
        (SamplingParams(temperature=0.7, top_k=0, min_p=0.02), [processors.MinPLogitsWarper(0.02)]),
        (SamplingParams(temperature=0.7, top_k=0, min_p=1.0), [processors.MinPLogitsWarper(1.0)]),
        (
            SamplingParams(temperature=0.7, top_k=30, top_p=0.8, min_p=0.05),
            [processors.TopKLogitsWarper(30), processors.TopPLogitsWarper(0.8), processors.MinPLogitsWarper(0.05)],
        ),
    ):
        expected = processors.TemperatureLogitsWarper(0.7)(None, logits)
        for warper in theirs:
            expected = warper(None, expected)
        torch.testing.assert_close(filtered(logits, params), expected.log_softmax(-1), msg=str(params))


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = random_logits(4, 50)
    tokens = torch.randint(0, 50, (4, 12), generator=torch.Generator().manual_seed(3))
    seen = torch.zeros(4, 50, dtype=torch.bool).scatter(1, tokens, True)
    expected = processors.RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits)
    torch.testing.assert_close(penalize(logits, penalty, seen), expected)


def test_the_most_extreme_random_numbers_choose_tokens_that_may_be_chosen() -> None:
    logits = torch.tensor([[-math.inf, 1.0, 2.0, -math.inf]] * 2)
    uniforms = torch.tensor([0.0, 1 - 2**-24])
    for params in (SamplingParams(top_k=0), SamplingParams(top_k=3), SamplingParams(top_k=0, top_p=0.99)):
        assert set(choose_tokens(logits, params, uniforms, None).tolist()) == {1, 2}


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_no_temperature_overflows(temperature: float) -> None:
    logits = random_logits(1, 100)
    chosen = choose_tokens(logits.expand(500, -1), SamplingParams(temperature=temperature), torch.rand(500), None)
    assert len(chosen.unique()) == (1 if temperature < 1 else 50)
    assert chosen.max() < 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"stop": ("a", "")},
    ],
    ids=str,
)
def test_impossible_parameters_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_one_stop_string_may_be_given_as_it_is() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
