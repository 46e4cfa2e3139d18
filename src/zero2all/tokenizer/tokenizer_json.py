"""Read a ``tokenizer.json`` of any origin: one that cannot be used is refused before anything is built from it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.errors import Z2aError
from zero2all.tokenizer.vocabulary import byte_alphabet

MAX_IDS = 1 << 24  # tables have a row for every id up to the largest


@dataclass(frozen=True)
class TokenizerDefinition:
    """A byte-level BPE tokenizer in Hugging Face's format."""

    raw: dict[str, Any]
    text_ids: dict[str, int]
    special_ids: dict[str, int]


def read_tokenizer_json(path: Path, data: bytes) -> TokenizerDefinition:
    """``data`` is what ``path`` holds."""
    try:
        definition = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _unusable(path, f"it is not valid JSON ({error})") from error
    try:
        special = {token["content"]: token["id"] for token in definition["added_tokens"]}
        model, vocabulary = definition["model"], definition["model"]["vocab"]
        text = {token: id for token, id in vocabulary.items() if token not in special}
        pre_tokenizer = definition["pre_tokenizer"]
    except (AttributeError, KeyError, TypeError) as error:
        raise _unusable(path, f"{type(error).__name__}: {error}") from error
    rules = [
        (model.get("type", "BPE") != "BPE", f"its model is {model.get('type')}, not BPE"),
        (not text, "its vocabulary is empty"),
        (not (pre_tokenizer is None or isinstance(pre_tokenizer, dict)), "its pre_tokenizer is not an object"),
        (bool(set().union(*text) - set(byte_alphabet())), "its tokens are not written in the byte-level alphabet"),
        (why := _id_problem([*text.values(), *special.values()]), why),
    ]
    for wrong, reason in rules:
        if wrong:
            raise _unusable(path, str(reason))
    return TokenizerDefinition(definition, text, special)


def _id_problem(ids: list[Any]) -> str:
    if not all(type(id) is int for id in ids):
        return "an id is not an integer"
    if min(ids, default=0) < 0 or max(ids, default=0) >= MAX_IDS:
        return f"an id is not between 0 and {MAX_IDS - 1}"
    if len(set(ids)) < len(ids):
        return "two tokens have the same id"
    return ""


def _unusable(path: Path, why: str) -> Z2aError:
    return Z2aError(f"{path} is not a tokenizer that can be used: {why}; copy it again or train one")
