from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zero2all.base.errors import UsageError, Z2aError
from zero2all.generation import SamplingParams, generate_batch, stream
from zero2all.model import ModelInputs, Z2all
from zero2all.tokenizer import Tokenizer
from zero2all.train import Run

PROMPTS = [
    "the model",
    "",
    "春眠不觉晓",
    "def f1(x):\n    # 第",
    "a line of text and then it says what comes next",
    "the",
]
GREEDY = SamplingParams(max_tokens=20, temperature=0)


@pytest.fixture
def model(tiny_run: Run) -> Z2all:
    return tiny_run.load_model()


@pytest.fixture(scope="module")
def tokenizer(tiny_run: Run) -> Tokenizer:
    return tiny_run.tokenizer()


def set_next_token(model: Z2all, tokenizer: Tokenizer, next_token: Callable[[int], int]) -> list[int]:
    """Make a model certain of ``next_token(number of the forward pass)``; the rows of each pass."""
    rows: list[int] = []

    def forward(inputs: ModelInputs) -> Tensor:
        token = next_token(len(rows))
        rows.append(len(inputs.tokens_BS))
        return torch.full((rows[-1], 1, tokenizer.vocab_size), -100.0).index_fill(2, torch.tensor([token]), 100.0)

    model.forward = forward  # type: ignore[method-assign, assignment]
    model.train()  # else generation computes single tokens without it
    return rows


def test_greedy_tokens_and_logprobs_are_those_of_forward_passes_without_a_cache(
    model: Z2all, tokenizer: Tokenizer
) -> None:
    for prompt, completion in zip(PROMPTS, generate_batch(model, tokenizer, PROMPTS, GREEDY), strict=True):
        ids = [tokenizer.eos_token_id, *tokenizer.encode(prompt)]
        assert completion.prompt_tokens == ids
        tokens: list[int] = []
        logprobs: list[Tensor] = []
        with torch.inference_mode():
            while len(tokens) < 20 and not set(tokens) & set(tokenizer.stop_token_ids):
                logits = model(torch.tensor([ids + tokens]))[0, -1, : tokenizer.vocab_size]
                forbidden = sorted(set(tokenizer.special_ids.values()) - set(tokenizer.stop_token_ids))
                tokens.append(int(logits.index_fill(0, torch.tensor(forbidden), -math.inf).argmax()))
                logprobs.append(logits.log_softmax(-1)[tokens[-1]])
        assert completion.tokens == tokens
        torch.testing.assert_close(torch.tensor(completion.logprobs), torch.stack(logprobs), atol=1e-4, rtol=0)
        ended = tokens[-1] in tokenizer.stop_token_ids
        assert completion.text == tokenizer.decode(tokens[:-1] if ended else tokens)
        assert completion.finish_reason == ("stop" if ended else "length")


@pytest.mark.parametrize("batch_size", [1, 2, 4, 64])
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(max_tokens=30, seed=5),
        SamplingParams(max_tokens=25, top_k=0, top_p=0.9, repetition_penalty=1.2, stop=("e", "，")),
    ],
    ids=["greedy", "top-k", "top-p with stop strings"],
)
def test_a_text_does_not_depend_on_the_prompts_beside_it(
    model: Z2all, tokenizer: Tokenizer, params: SamplingParams, batch_size: int
) -> None:
    alone = [generate_batch(model, tokenizer, [prompt], params)[0] for prompt in PROMPTS]
    together = generate_batch(model, tokenizer, PROMPTS * 2, params, batch_size)
    for one, other in zip(alone, together[: len(PROMPTS)], strict=True):
        assert (one.text, one.tokens, one.finish_reason) == (other.text, other.tokens, other.finish_reason)
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=0)
    second = [completion.tokens for completion in together[len(PROMPTS) :]]
    assert (second == [completion.tokens for completion in alone]) == (params.temperature == 0)


def test_streamed_pieces_are_the_text(model: Z2all, tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=40, seed=2, stop=("e ",))
    texts = [""] * len(PROMPTS)
    completions = {}
    for piece in stream(model, tokenizer, PROMPTS, params, batch_size=4):
        assert piece.index not in completions
        texts[piece.index] += piece.text
        if piece.completion is not None:
            completions[piece.index] = piece.completion
    expected = generate_batch(model, tokenizer, PROMPTS, params, batch_size=4)
    assert [completions[index] for index in range(len(PROMPTS))] == expected
    assert texts == [completion.text for completion in expected]


def test_more_tokens_continue_the_same_text(model: Z2all, tokenizer: Tokenizer) -> None:
    for seed in range(5):
        short, long = (
            generate_batch(model, tokenizer, ["the"], SamplingParams(max_tokens=count, seed=seed))[0].tokens
            for count in (5, 30)
        )
        assert long[: len(short)] == short


def test_no_special_token_is_sampled(model: Z2all, tokenizer: Tokenizer) -> None:
    """At a very high temperature all tokens are equally likely, the dozens of reserved ones too."""
    params = SamplingParams(temperature=1e9, top_k=0)
    text = "".join(completion.text for completion in generate_batch(model, tokenizer, ["the"] * 20, params))
    assert text
    assert [name for name in tokenizer.special_ids if name in text] == []


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|im_end|>"])
def test_generation_stops_at_the_end_of_the_document_or_message(name: str, model: Z2all, tokenizer: Tokenizer) -> None:
    end, letter = tokenizer.special_ids[name], tokenizer.encode("x")[0]
    set_next_token(model, tokenizer, lambda number: letter if number < 3 else end)
    [completion] = generate_batch(model, tokenizer, ["the"], SamplingParams(max_tokens=10, temperature=0))
    assert completion.text == "xxx"
    assert completion.tokens == [letter] * 3 + [end]
    assert completion.finish_reason == "stop"


def test_generation_stops_at_the_context_length_and_long_prompts_keep_their_end(
    model: Z2all, tokenizer: Tokenizer
) -> None:
    letter = tokenizer.encode("x")[0]
    set_next_token(model, tokenizer, lambda number: letter)  # a model that never ends a document
    prompt = "the model reads " * 100
    for text, max_tokens, generated in ((prompt, 10, 10), (prompt, 1000, 32), ("", 5, 5), ("", 1000, 63)):
        [completion] = generate_batch(model, tokenizer, [text], SamplingParams(max_tokens=max_tokens))
        assert completion.text == "x" * generated
        assert completion.finish_reason == "length"
        assert len(completion.prompt_tokens) + generated <= model.config.max_position_embeddings
        assert completion.prompt_tokens[-5:] == [tokenizer.eos_token_id, *tokenizer.encode(text)][-5:]


def test_finished_rows_are_not_computed(model: Z2all, tokenizer: Tokenizer) -> None:
    """Each row of a forward pass is a token of some completion."""
    completions = generate_batch(model, tokenizer, PROMPTS, SamplingParams(max_tokens=40, stop=("e", "，")))
    lengths = [len(completion.tokens) for completion in completions]
    assert len(set(lengths)) > 2
    computed = []
    model.embed_tokens.register_forward_hook(lambda module, inputs, output: computed.append(len(inputs[0])))
    assert generate_batch(model, tokenizer, PROMPTS, SamplingParams(max_tokens=40, stop=("e", "，"))) == completions
    assert sum(computed) == sum(lengths)


def test_many_prompts_share_forward_passes(model: Z2all, tokenizer: Tokenizer) -> None:
    rows = set_next_token(model, tokenizer, lambda number: 100)
    generate_batch(model, tokenizer, PROMPTS * 4, SamplingParams(max_tokens=10, temperature=0), batch_size=8)
    assert max(rows) == 8
    assert len(rows) == 3 * 10


def test_a_stop_string_ends_the_text_wherever_tokens_split_it(model: Z2all, tokenizer: Tokenizer) -> None:
    [full] = generate_batch(model, tokenizer, ["the model"], SamplingParams(max_tokens=40, seed=1))
    assert len(full.text) > 20
    for first in (0, 5, 11):
        stop = full.text[first : first + 7]
        params = SamplingParams(max_tokens=40, seed=1, stop=("never said", stop))
        [completion] = generate_batch(model, tokenizer, ["the model"], params)
        assert completion.text == full.text[: full.text.index(stop)]
        assert completion.finish_reason == "stop"
        assert completion.tokens == full.tokens[: len(completion.tokens)]
        assert stop in tokenizer.decode(completion.tokens)


def test_a_high_repetition_penalty_prevents_repetition(model: Z2all, tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=30, temperature=0, repetition_penalty=1e6)
    [completion] = generate_batch(model, tokenizer, ["the model"], params)
    read = completion.prompt_tokens + completion.tokens
    assert len(read) == len(set(read))


def test_a_prompt_may_be_tokens(model: Z2all, tokenizer: Tokenizer) -> None:
    ids = [tokenizer.eos_token_id, *tokenizer.encode("the model")]
    as_tokens, as_text = generate_batch(model, tokenizer, [ids, "the model"], GREEDY)
    assert (as_tokens.prompt_tokens, as_tokens.tokens) == (as_text.prompt_tokens, as_text.tokens)
    with pytest.raises(UsageError, match="prompt 1 has no tokens"):
        generate_batch(model, tokenizer, ["the", []], GREEDY)
    assert generate_batch(model, tokenizer, [], GREEDY) == []


def test_a_diverged_model_is_reported(model: Z2all, tokenizer: Tokenizer) -> None:
    with torch.no_grad():
        model.norm.weight[0] = math.nan
    for params in (GREEDY, SamplingParams()):
        with pytest.raises(Z2aError, match="logits are NaN"):
            generate_batch(model, tokenizer, ["the model"], params)


def test_the_caller_hears_of_every_forward_pass(model: Z2all, tokenizer: Tokenizer) -> None:
    calls: list[int] = []
    [completion] = generate_batch(model, tokenizer, ["the"], GREEDY, on_step=lambda: calls.append(1))
    assert len(completion.tokens) - 1 <= len(calls) <= len(completion.tokens)
