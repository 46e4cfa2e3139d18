from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_recipe
from zero2all.generation import generate
from zero2all.train import Run, train


@pytest.fixture(scope="module")
def run(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    recipe = tiny_recipe(workspace, f"out={tmp_path_factory.mktemp('generate')}", "train.steps=20")
    train(recipe)
    return Run.open(recipe.run_dir)


def test_greedy_text_is_the_argmax_without_a_cache(run: Run) -> None:
    model, tokenizer = run.load_model(), run.tokenizer()
    ids = [tokenizer.eos_token_id, *tokenizer.encode("the model")]
    plain: list[int] = []
    with torch.inference_mode():
        for _ in range(20):
            token = int(model(torch.tensor([ids + plain]))[0, -1].argmax())
            if token == tokenizer.eos_token_id:
                break
            plain.append(token)
    text = generate(model, tokenizer, "the model", max_tokens=20, temperature=0)
    assert text == tokenizer.decode(plain)
    assert text


def test_the_seed_decides_the_text(run: Run) -> None:
    model, tokenizer = run.load_model(), run.tokenizer()
    one, same, other = (generate(model, tokenizer, "the", seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_no_special_token_is_sampled(run: Run) -> None:
    """At a very high temperature all tokens are equally likely, the dozens of reserved ones too."""
    model, tokenizer = run.load_model(), run.tokenizer()
    text = "".join(generate(model, tokenizer, "the", temperature=1e9, top_k=0, seed=seed) for seed in range(20))
    assert text
    assert [name for name in tokenizer.special_ids if name in text] == []


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|im_end|>"])
def test_generation_stops_at_the_end_of_the_document_or_message(name: str, run: Run) -> None:
    model, tokenizer = run.load_model(), run.tokenizer()
    end, letter = tokenizer.special_ids[name], tokenizer.encode("x")[0]
    given = []

    def next_logits(*args: object, **kwargs: object) -> torch.Tensor:
        given.append(letter if len(given) < 3 else end)
        return torch.nn.functional.one_hot(torch.tensor([[given[-1]]]), tokenizer.vocab_size).float()

    model.forward = next_logits  # type: ignore[method-assign]
    assert generate(model, tokenizer, "the", max_tokens=10, temperature=0) == "xxx"


def test_generation_stops_at_the_context_length_and_long_prompts_keep_their_end(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = run.load_model(), run.tokenizer()
    letter = tokenizer.encode("x")[0]
    module = importlib.import_module("zero2all.generation.generate")
    monkeypatch.setattr(module, "_sample_token", lambda *args: letter)  # a model that never ends a document
    prompt = "the model reads " * 100
    for text, max_tokens, generated in ((prompt, 10, 10), (prompt, 1000, 32), ("", 5, 5), ("", 1000, 63)):
        assert generate(model, tokenizer, text, max_tokens=max_tokens) == "x" * generated
