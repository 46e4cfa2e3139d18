"""Reading a ``tokenizer.json`` from anywhere: what cannot be used is refused before anything is built from it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.errors import Z2aError
from zero2all.tokenizer.vocabulary import byte_alphabet

MOST_IDS = 1 << 24  # tables have a row for every id up to the largest


@dataclass(frozen=True)
class Definition:
    """A byte-level BPE tokenizer as Hugging Face writes it down."""

    all: dict[str, Any]
    text_ids: dict[str, int]
    special_ids: dict[str, int]


def read_definition(path: Path, data: bytes) -> Definition:
    """``data`` is what ``path`` holds."""
    try:
        definition = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _unusable(path, f"it is no JSON ({error})") from error
    try:
        special = {token["content"]: token["id"] for token in definition["added_tokens"]}
        model, vocabulary = definition["model"], definition["model"]["vocab"]
        text = {token: id for token, id in vocabulary.items() if token not in special}
        cut = definition["pre_tokenizer"]
    except (AttributeError, KeyError, TypeError) as error:
        raise _unusable(path, f"{type(error).__name__}: {error}") from error
    rules = [
        (model.get("type", "BPE") != "BPE", f"its model is {model.get('type')}, not BPE"),
        (not text, "its vocabulary is empty"),
        (not (cut is None or isinstance(cut, dict)), "its pre_tokenizer is no object"),
        (bool(set().union(*text) - set(byte_alphabet())), "its tokens are not written in the byte-level alphabet"),
        (why := _wrong_ids([*text.values(), *special.values()]), why),
    ]
    for wrong, reason in rules:
        if wrong:
            raise _unusable(path, str(reason))
    return Definition(definition, text, special)


def _wrong_ids(ids: list[Any]) -> str:
    if not all(type(id) is int for id in ids):
        return "an id is not a whole number"
    if min(ids, default=0) < 0 or max(ids, default=0) >= MOST_IDS:
        return f"an id is not between 0 and {MOST_IDS - 1}"
    if len(set(ids)) < len(ids):
        return "two tokens have the same id"
    return ""


def _unusable(path: Path, why: str) -> Z2aError:
    return Z2aError(f"{path} is not a tokenizer that can be used: {why}; copy it again or train one")
