"""Prompts of samples: from every source, also from one without validation documents."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from zero2all.tokens import inspect
from zero2all.tokens.inspect import opening_prompts


def shard(*documents: list[int]) -> Any:
    offsets = np.cumsum([0, *map(len, documents)])
    return SimpleNamespace(document_offsets=offsets, tokens=np.array([token for one in documents for token in one]))


def open_stores(monkeypatch: pytest.MonkeyPatch, valid: dict[str, Any], train: dict[str, Any]) -> Any:
    stores = {"valid": SimpleNamespace(sources=valid), "train": SimpleNamespace(sources=train)}
    monkeypatch.setattr(inspect, "TokenStore", lambda directory, split: stores[split])
    return SimpleNamespace(special_ids={"<end>": 0}, decode=lambda ids: " ".join(map(str, ids)))


def test_a_source_without_validation_documents_gives_a_training_one(monkeypatch: pytest.MonkeyPatch) -> None:
    train = {name: [shard([first, first, 0])] for name, first in (("book", 1), ("notes", 2), ("records", 3))}
    tokenizer = open_stores(
        monkeypatch, {"book": [], "notes": [shard()], "records": [shard([7, 7, 0], [8, 8, 0])]}, train
    )
    assert opening_prompts(Path(), tokenizer, 3) == ["1 1", "2 2", "7 7"]
    assert opening_prompts(Path(), tokenizer, 4) == ["1 1", "2 2", "7 7", "8 8"]


def test_more_sources_than_prompts_give_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    train = {str(number): [shard([number, 0])] for number in range(1, 6)}
    tokenizer = open_stores(monkeypatch, {}, train)
    assert opening_prompts(Path(), tokenizer, 3) == ["1", "2", "3", "4", "5"]
