"""Log-likelihoods equal those of one full forward pass for each request, and those of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import CHINESE, CODE, ENGLISH
from tests.ranks import on_ranks
from tests.runs import WIDE, wide_model
from zero2all.base.errors import UsageError, Z2aError
from zero2all.evals.log_likelihood import Score, ScoringRequest, encode_pair, score
from zero2all.model import Z2all
from zero2all.model.hf import export_hf
from zero2all.parallel import ParallelDims, ParallelMesh, ParallelModel
from zero2all.recipe import ModelConfig, ParallelRecipe
from zero2all.tokenizer import Tokenizer

VOCAB = 300
CONTEXT = 48
CONFIG = {**WIDE, "max_position_embeddings": CONTEXT, "vocab_size": VOCAB}
EXPERTS = {"moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}}
DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 8}}
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied, soft-cap, window": {
        "tie_word_embeddings": True, "final_logit_softcapping": 5.0, "sliding_window": 5, "full_attention_interval": 2,
    },
    "experts": EXPERTS,
    "dynamic RoPE": DYNAMIC,
}  # fmt: skip
TWO_RANKS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tp": 2, "sp": True}, {}),
    ({"tp": 2, "sp": False}, EXPERTS),
    ({"pp": 2, "schedule": "1f1b"}, {"tie_word_embeddings": False}),
    ({"dp_shard": 2, "ep": 2}, EXPERTS),
    ({"cp": 2}, {}),
    ({"dp_replicate": 2, "dp_shard": 1}, {}),
]


def build(changes: dict[str, Any]) -> Z2all:
    return wide_model(**{**CONFIG, **changes})


def random_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB) for _ in range(count))


def make_requests(model: Z2all) -> list[ScoringRequest]:
    """Every length, letters with the same context, a continuation that begins another, duplicates, too long ones."""
    rng = random.Random(5)
    requests = [
        ScoringRequest(random_tokens(rng, size), random_tokens(rng, rng.randint(1, 6))) for size in (1, 2, 3, 5, 8, 13)
    ]
    question = random_tokens(rng, 20)
    requests += [ScoringRequest(question, (letter,)) for letter in (7, 8, 9, 8)]
    requests += [ScoringRequest(question, (7, *random_tokens(rng, extra))) for extra in (1, 4, 0)]
    requests += [ScoringRequest(question, random_tokens(rng, size)) for size in (2, 3, 5)]  # share a beginning
    requests += [ScoringRequest((*question[:18], *random_tokens(rng, 4)), random_tokens(rng, 3)) for _ in range(3)]
    requests += [ScoringRequest(question[:4], question[4:6]), ScoringRequest((3,), ()), ScoringRequest(question, ())]
    requests += [
        ScoringRequest(random_tokens(rng, 80), random_tokens(rng, 5)),
        ScoringRequest((1,), random_tokens(rng, CONTEXT)),
    ]
    for size in (4, 12):  # what greedy decoding gives, the same with another last token, and with another first
        tokens = list(random_tokens(rng, size))
        for _ in range(3):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        requests.append(ScoringRequest(tuple(tokens[:size]), tuple(tokens[size:])))
        requests.append(ScoringRequest(tuple(tokens[:size]), (*tokens[size:-1], (tokens[-1] + 1) % VOCAB)))
        tokens[size:] = [(tokens[size] + 1) % VOCAB]
        requests.append(
            ScoringRequest(tuple(tokens[:size]), (tokens[size], int(model(torch.tensor([tokens]))[0, -1].argmax())))
        )
    rng.shuffle(requests)
    return requests


@torch.no_grad()
def plain_score(compute_logits: Any, request: ScoringRequest, limit: int = CONTEXT) -> Score:
    """One full forward pass of one request."""
    if not request.continuation:
        return Score(0.0, True)
    inputs = torch.tensor([(*request.context, *request.continuation)[:-1][-limit:]])
    logits = compute_logits(inputs)[0, -len(request.continuation) :].float()
    targets = torch.tensor(request.continuation)
    nats = -logits.log_softmax(-1).gather(1, targets[:, None]).sum()
    return Score(float(nats), bool((logits.argmax(-1) == targets).all()))


def assert_equal(found: list[Score], expected: list[Score]) -> None:
    assert [one.greedy for one in found] == [one.greedy for one in expected]
    torch.testing.assert_close(
        torch.tensor([one.nats for one in found]), torch.tensor([one.nats for one in expected]), atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("batch_tokens", [1, 60, 8192])
def test_a_batch_scores_as_one_by_one(variant: str, batch_tokens: int) -> None:
    model = build(VARIANTS[variant])
    requests = make_requests(model)
    expected = [plain_score(model, request) for request in requests]
    assert {True, False} == {
        one.greedy for one, request in zip(expected, requests, strict=True) if request.continuation
    }
    assert_equal(score(model, requests, batch_tokens), expected)


def test_many_positions_are_scored_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.model.blocks.chunk_rows", lambda *_: 3)
    model = build({})
    requests = make_requests(model)
    assert_equal(score(model, requests), [plain_score(model, request) for request in requests])


@pytest.mark.parametrize(
    ("requests", "shape"),
    [
        ([ScoringRequest(tuple(range(10)), (letter,)) for letter in range(20, 24)], (1, 10)),
        ([ScoringRequest(tuple(range(30)), (40 + number, 50, 60)) for number in range(4)], (1, 30 + 4 * 2)),
    ],
    ids=["the letters of a question", "longer answers"],
)
def test_a_shared_beginning_is_computed_once(requests: list[ScoringRequest], shape: tuple[int, int]) -> None:
    model, passed = build({}), []
    model.register_forward_pre_hook(lambda module, inputs: passed.append(tuple(inputs[0].tokens_BS.shape)))
    score(model, requests)
    assert passed == [shape]
    dynamic = build(DYNAMIC)  # where each length has other positions
    assert_equal(score(dynamic, requests), [plain_score(dynamic, request) for request in requests])


def test_scores_are_those_of_transformers(workspace: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer(workspace / "tokenizer")
    model = build({"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 64})
    export_hf(model, tmp_path, tokenizer.stop_token_ids)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    texts = [9 * text for text in (ENGLISH, CHINESE, CODE.format(n=7))]
    pairs = [(text[:cut], text[cut : cut + size]) for text in texts for cut in (0, 7, 30, 200) for size in (1, 9)]
    requests = [encode_pair(tokenizer, *pair) for pair in pairs]
    assert all(request.continuation for request in requests)
    expected = [plain_score(lambda inputs: theirs(inputs).logits, request, 64) for request in requests]
    assert_equal(score(model, requests), expected)


def test_pairs_are_split_as_lm_eval_splits_them(workspace: Path) -> None:
    tokenizer = Tokenizer(workspace / "tokenizer")
    end, encode = tokenizer.eos_token_id, tokenizer.encode
    for context, continuation in (("the model", " learns"), ("中国的首都是", "北京"), ("", "the"), ("x =", "\n")):
        whole, split = encode(context + continuation), len(encode(context))
        assert encode_pair(tokenizer, context, continuation) == ScoringRequest(
            (end, *whole[:split]), tuple(whole[split:])
        )
    assert encode_pair(tokenizer, "the model ", "learns") == encode_pair(tokenizer, "the model", " learns")
    assert encode_pair(tokenizer, "", "") == ScoringRequest((end,), ())
    table = enumerate(tokenizer.token_bytes)
    token, text = next((id, data.decode()) for id, data in table if len(data) == 2 and data.isalpha())
    assert encode_pair(tokenizer, text[0], text[1]) == ScoringRequest(
        (end,), (token,)
    )  # the boundary is inside a token


def test_impossible_requests_are_refused() -> None:
    model = build({})
    with pytest.raises(UsageError, match="request 1 has no context"):
        score(model, [ScoringRequest((1,), (2,)), ScoringRequest((), (2,))])
    with pytest.raises(UsageError, match=f"{CONTEXT + 1} tokens does not fit"):
        score(model, [ScoringRequest((1,), (2,) * (CONTEXT + 1))])
    assert score(model, []) == []
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(Z2aError, match="NaN"):
        score(model, [ScoringRequest((1,), (2,))])


def score_on_ranks(world: int, layouts: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[list[Score]]:
    found = []
    for sizes, changes in layouts:
        recipe = ParallelRecipe(**sizes)
        mesh = ParallelMesh(ParallelDims.from_recipe(recipe, world), torch.device("cpu"))
        model = ParallelModel(ModelConfig.model_validate({**CONFIG, **changes}), recipe, mesh, seed=1)
        found.append(score(model, requests_within(CONTEXT - 1), batch_tokens=60))
        assert model.model.training
    return found


def requests_within(limit: int) -> list[ScoringRequest]:
    """With sp the last position of the context is padding."""
    return [request for request in make_requests(build({})) if len(request.continuation) <= limit]


def check_ranks(world: int, layouts: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    found = on_ranks(world, score_on_ranks, world, layouts, detail=False)
    for (sizes, changes), *own in zip(layouts, *found, strict=True):
        limit = CONTEXT - 1 if sizes.get("sp", "tp" in sizes) else CONTEXT
        model = build(changes)
        expected = [plain_score(model, request, limit) for request in requests_within(CONTEXT - 1)]
        for scores in own:
            assert_equal(scores, expected)


@pytest.mark.long
def test_two_ranks_score_as_one_process() -> None:
    check_ranks(2, TWO_RANKS)


@pytest.mark.long
def test_four_ranks_score_as_one_process() -> None:
    check_ranks(4, [({"tp": 2, "pp": 2, "sp": True, "schedule": "1f1b"}, {"tie_word_embeddings": False})])
