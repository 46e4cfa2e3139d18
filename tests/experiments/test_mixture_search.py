"""A mixture search with real training on Chinese, English, code and a source of shuffled characters."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
POOR = "shuffled"
TARGET = "zh=1,en=1,code=1"
LENGTH = ["--budget", "200K-tokens", "--target", TARGET]
RECIPE = """
seed: 5
tokenizer: {vocab_size: 2048}
model: {hidden_size: 128, intermediate_size: 352, num_hidden_layers: 2, num_attention_heads: 4,
  num_key_value_heads: 4, max_position_embeddings: 128}
train:
  tokens: 3M
  seq_len: 128
  batch_tokens: 2Ki
  precision: fp32
  optimizer: {lr: 5e-3}
checkpoint: {every: 1000 steps, flash_every: null}
evals: {tokens: 32Ki}
"""


def write_shuffled(books: list[Path], path: Path) -> None:
    """Documents of the characters of books in random order."""
    rng = random.Random(1)
    with open(path, "w", encoding="utf-8") as stream:
        for book in books:
            text = book.read_text(encoding="utf-8", errors="replace")
            for start in range(0, len(text), 4000):
                part = list(text[start : start + 4000])
                rng.shuffle(part)
                stream.write(json.dumps({"text": "".join(part)}) + "\n")


def write_recipe(corpus: Path, directory: Path) -> Path:
    english, chinese = sorted((corpus / "en/books").glob("*.txt"))[:4], sorted((corpus / "zh/txt").glob("*.txt"))
    write_shuffled([english[0], english[1], chinese[0]], directory / "shuffled.jsonl")
    sources = [
        {"name": "zh", "paths": list(map(str, chinese))},
        {"name": "en", "paths": list(map(str, english))},
        {"name": "code", "paths": [str(corpus / "code/cpython_stdlib_3.11.7.tar.gz")], "take": 0.2},
        {"name": POOR, "paths": [str(directory / "shuffled.jsonl")]},
    ]
    recipe = yaml.safe_load(RECIPE) | {"out": str(directory / "out")}
    recipe["corpus"] = {"sources": sources, "holdout": 0.05, "filters": []}
    path = directory / "my.yaml"
    path.write_text(yaml.safe_dump(recipe, allow_unicode=True), encoding="utf-8")
    return path


def z2a(*words: object) -> Any:
    program = [sys.executable, "-c", "from zero2all.cli.main import main; main()", *map(str, words), "--json"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_suggestion_has_least_of_the_poor_source_and_beats_equal_weights(
    shared_corpus: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(shared_corpus, tmp_path)
    found = z2a("compare", recipe, "--mixtures", 12, *LENGTH, "--name", "mix")
    fit = found["experiment"]["fit"]
    assert fit["error"] < 0.6 * fit["mean_error"]
    assert fit["rank_correlation"] > 0.5
    sources = {one["source"]: one for one in fit["sources"]}
    assert min(sources, key=lambda name: sources[name]["suggested"]) == POOR
    assert sources[POOR]["low"] > 0, "more of it raises the target, beyond the noise"

    equal = tmp_path / "equal.yaml"
    weights = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    weights["train"]["mixture"] = dict.fromkeys(sources, 1.0)
    equal.write_text(yaml.safe_dump(weights, allow_unicode=True), encoding="utf-8")
    suggested = tmp_path / "out/experiments/mix/suggested.yaml"
    compared = z2a("compare", suggested, equal, *LENGTH, "--seeds", 3)
    assert compared["verdicts"][0].startswith("suggested is better than equal by ")
    assert compared["experiment"]["verdicts"][0]["margin"] is not None
    assert len({variant["result"]["tokens"] for variant in compared["experiment"]["variants"]}) == 1
