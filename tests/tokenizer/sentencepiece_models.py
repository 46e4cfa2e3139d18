"""Sentencepiece models with the settings of LLaMA's, trained on real English where it exists."""

from __future__ import annotations

import io
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from zero2all.storyworld import generate_stories

CORPUS = Path(os.environ.get("Z2A_TEST_CORPUS", Path(__file__).parents[3] / "shared" / "corpus"))


@cache
def documents(language: str) -> list[str]:
    """Those of the shared corpus, or generated ones."""
    path = CORPUS / "valid" / f"{language}_valid.jsonl"
    if path.exists():
        return [json.loads(line)["text"] for line in path.read_bytes().splitlines()]
    return list(generate_stories(language, 3, 2000))


def texts(language: str, characters: int) -> list[str]:
    """The first documents, up to so many characters."""
    chosen: list[str] = []
    for text in documents(language):
        if characters <= 0:
            break
        chosen.append(text[:characters])
        characters -= len(chosen[-1])
    return chosen


def llama_style(algorithm: str = "bpe", vocab_size: int = 700, characters: int = 100_000, **options: Any) -> bytes:
    """Trained once for the same settings."""
    return _train(algorithm, vocab_size, characters, json.dumps(options))


@cache
def _train(algorithm: str, vocab_size: int, characters: int, options: str) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    lines = [line[:1000] for text in texts("en", characters) for line in text.split("\n") if line]
    settings: dict[str, Any] = {
        "model_type": algorithm,
        "vocab_size": vocab_size,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "num_threads": 2,
        "minloglevel": 2,
        **json.loads(options),
    }
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **settings)
    return model.getvalue()
