from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_recipe
from zero2all.serve import generate
from zero2all.train import Run, train


@pytest.fixture(scope="module")
def run(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    recipe = tiny_recipe(world, f"out={tmp_path_factory.mktemp('generate')}", "train.steps=20")
    train(recipe)
    return Run.open(recipe.run_dir)


def test_greedy_text_is_the_argmax_of_the_whole_sequence(run: Run) -> None:
    model, tokenizer = run.load_model(), run.tokenizer()
    ids = [tokenizer.end_of_text, *tokenizer.encode("the model")]
    plain: list[int] = []
    with torch.inference_mode():
        for _ in range(20):
            token = int(model(torch.tensor([ids + plain]))[0, -1].argmax())
            if token == tokenizer.end_of_text:
                break
            plain.append(token)
    text = generate(model, tokenizer, "the model", max_tokens=20, temperature=0)
    assert text == tokenizer.decode(plain)
    assert text


def test_seed_decides_the_text(run: Run) -> None:
    model, tokenizer = run.load_model(), run.tokenizer()
    one, same, other = (generate(model, tokenizer, "the", seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_text_stops_at_the_context_and_long_prompts_keep_their_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = run.load_model(), run.tokenizer()
    letter = tokenizer.encode("x")[0]
    module = importlib.import_module("zero2all.serve.generate")
    monkeypatch.setattr(module, "_pick", lambda *args: letter)  # a model that never ends a document
    prompt = "the model reads " * 100
    for words, asked, given in ((prompt, 10, 10), (prompt, 1000, 32), ("", 5, 5), ("", 1000, 63)):
        assert generate(model, tokenizer, words, max_tokens=asked) == "x" * given
