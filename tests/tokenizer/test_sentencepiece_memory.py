"""The memory that sentencepiece is expected to take decides how much text it gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero2all.io import read_documents_manifest
from zero2all.recipe import TokenizerRecipe
from zero2all.tokenizer import sentencepiece_vocabulary

PUBLISHED_TEXT, PUBLISHED_PEAK = 20e9, 135e9  # bytes, of a large corpus
MEMORY = 1 << 30


def test_the_estimate_covers_what_was_published() -> None:
    estimate = sentencepiece_vocabulary.PROCESS_MEMORY + sentencepiece_vocabulary.MEMORY_PER_BYTE * PUBLISHED_TEXT
    assert PUBLISHED_PEAK < estimate < 5 * PUBLISHED_PEAK, "of Chinese, each byte takes three times that of English"


def test_the_package_gets_no_more_text_than_the_estimate_allows(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sentencepiece")
    corpus = read_documents_manifest(workspace / "documents")
    available = sum(source.bytes for source in corpus.splits["train"].values())
    rest = MEMORY - sentencepiece_vocabulary.MEMORY_PER_BYTE * (available // 2)
    monkeypatch.setattr(sentencepiece_vocabulary, "PROCESS_MEMORY", rest)  # half of the text fits
    recipe = TokenizerRecipe(trainer="sentencepiece-bpe", vocab_size=512, max_memory=MEMORY)
    learned = sentencepiece_vocabulary.train_sentencepiece(recipe, workspace / "documents", corpus, ("<|endoftext|>",))
    assert 0.2 * available < learned.trained_on_bytes < 0.8 * available
    assert "more would not fit into tokenizer.max_memory" in " ".join(capsys.readouterr().err.split())
