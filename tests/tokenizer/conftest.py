from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.builds import corpus_of, source_of
from zero2all.corpus import build_corpus
from zero2all.recipe import TokenizerRecipe
from zero2all.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def tokenizer(workspace: Path) -> Tokenizer:
    return Tokenizer(workspace / "tokenizer")


@pytest.fixture(scope="session")
def transformers_tokenizer(workspace: Path) -> Any:
    """The tokenizer of the workspace as transformers loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(workspace / "tokenizer")


@pytest.fixture(scope="session")
def real_texts(shared_corpus: Path) -> dict[str, list[str]]:
    """Validation documents of the shared corpus by domain."""
    return {
        name: [json.loads(line)["text"] for line in open(shared_corpus / "valid" / f"{name}_valid.jsonl", "rb")]
        for name in ("zh", "en", "code")
    }


@pytest.fixture(scope="session")
def real_tokenizer(shared_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """4,096 tokens of real Chinese, English and code, so that words have long merges."""
    root = tmp_path_factory.mktemp("real")
    build_corpus(corpus_of(source_of(shared_corpus / "valid" / "*_valid.jsonl")), root / "documents")
    train_tokenizer(TokenizerRecipe(vocab_size=4096), root / "documents", root / "tokenizer")
    return Tokenizer(root / "tokenizer")
