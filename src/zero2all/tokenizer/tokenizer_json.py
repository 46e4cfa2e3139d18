"""Read a ``tokenizer.json`` of any origin: one that cannot be used is refused before anything is built from it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.errors import Z2aError
from zero2all.tokenizer.text_vocabulary import (
    SPACE_MARK,
    UNICODE_FORMS,
    Json,
    TextVocabulary,
    byte_token,
    component_steps,
    hide_special,
)
from zero2all.tokenizer.vocabulary import byte_alphabet

MAX_IDS = 1 << 24  # tables have a row for every id up to the largest
SENTENCEPIECE_STEPS = ("Metaspace", "Split", "Digits")


@dataclass(frozen=True)
class TokenizerDefinition:
    """A tokenizer in Hugging Face's format."""

    text: TextVocabulary
    special_ids: dict[str, int]
    control_ids: list[int]
    """Those of them that a model writes only to end a text: not markers such as ``<think>``, which are declared to be
    ordinary."""


def read_tokenizer_json(path: Path, data: bytes) -> TokenizerDefinition:
    """``data`` is what ``path`` holds."""
    try:
        definition = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise unusable(path, f"it is not valid JSON ({error})") from error
    try:
        ids = _token_ids(definition["model"])
        special = {
            token["content"]: token["id"]
            for token in definition["added_tokens"]
            if _is_special(token, definition["model"], ids)
        }
        text_ids = {token: id for token, id in ids.items() if token not in special}
        problem = next(_problems(definition, ids, text_ids, special), None)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise unusable(path, f"{type(error).__name__}: {error}") from error
    if problem:
        raise unusable(path, problem)
    control = [token["id"] for token in definition["added_tokens"] if token.get("special", True) is not False]
    return TokenizerDefinition(_text_vocabulary(definition, text_ids, special), special, control)


def _token_ids(model: Json) -> dict[str, Any]:
    vocabulary = model["vocab"]
    if model.get("type", "BPE") == "Unigram":
        return {token: id for id, (token, _) in enumerate(vocabulary)}
    return dict(vocabulary.items())


def _is_special(token: Json, model: Json, ids: dict[str, Any]) -> bool:
    """Text may become an added token only if it is a user-defined symbol of sentencepiece, such as a newline: it is
    declared to be ordinary, and the model has it. Markers that were added to a model later are special in any case."""
    is_symbol = bool(model.get("byte_fallback")) and token.get("special", True) is False and token["content"] in ids
    return not is_symbol


def _problems(definition: Json, ids: Json, text_ids: Json, special: Json) -> Iterator[str]:
    """Why it cannot be used; the first reason is enough."""
    model = definition["model"]
    kind = model.get("type", "BPE")
    if kind not in ("BPE", "Unigram"):
        yield f"its model is {kind}, not BPE or Unigram"
    if not text_ids:
        yield "its vocabulary is empty"
    if not (definition["pre_tokenizer"] is None or isinstance(definition["pre_tokenizer"], dict)):
        yield "its pre_tokenizer is not an object"
    yield from _id_problems([*text_ids.values(), *special.values()])
    if any(ids.get(name, id) != id for name, id in special.items()):
        yield "a special token has two ids"
    if kind == "Unigram":
        yield from _unigram_problems(model, ids)
    if any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix")):
        yield "it marks the beginning or end of words, so text would not decode to itself"
    if model.get("byte_fallback"):
        yield from _sentencepiece_problems(definition, text_ids)
    elif set().union(*text_ids) - set(byte_alphabet()):
        yield "its tokens are not written in the byte-level alphabet, and it has no byte fallback: text would be lost"
    yield from _normalizer_problems(definition["normalizer"])


def _id_problems(ids: list[Any]) -> Iterator[str]:
    if not all(type(id) is int for id in ids):
        yield "an id is not an integer"
    if min(ids, default=0) < 0 or max(ids, default=0) >= MAX_IDS:
        yield f"an id is not between 0 and {MAX_IDS - 1}"
    if len(set(ids)) < len(ids):
        yield "two tokens have the same id"


def _unigram_problems(model: Json, ids: Json) -> Iterator[str]:
    if len(ids) < len(model["vocab"]):
        yield "two tokens have the same name"
    if not all(isinstance(score, int | float) and math.isfinite(score) for _, score in model["vocab"]):
        yield "a score is not a number"
    if not model.get("byte_fallback"):
        yield "it has no byte fallback: characters that it does not have would be lost"


def _sentencepiece_problems(definition: Json, text_ids: Json) -> Iterator[str]:
    if any(byte_token(byte) not in text_ids for byte in range(256)):
        yield "it has byte fallback, but not a token for each byte"
    if SPACE_MARK not in text_ids:
        yield "it has no token for a space"
    if any(" " in token for token in text_ids):
        yield "a token contains a space"
    for step in component_steps(definition["pre_tokenizer"]):
        if step["type"] not in SENTENCEPIECE_STEPS or step.get("behavior") == "Removed":
            yield f"its pre-tokenizer {step['type']} may remove text"
        if step["type"] == "Metaspace" and step["replacement"] != SPACE_MARK:
            yield f"it writes a space as {step['replacement']!r}"


def _normalizer_problems(normalizer: Json | None) -> Iterator[str]:
    for step in component_steps(normalizer):
        is_prefix = step["type"] == "Prepend" and step["prepend"] == SPACE_MARK
        is_space = step["type"] == "Replace" and (step["pattern"], step["content"]) == ({"String": " "}, SPACE_MARK)
        if step["type"] not in UNICODE_FORMS and not is_prefix and not is_space:
            yield f"its normalizer {step['type']} changes text"


def _text_vocabulary(definition: Json, text_ids: Json, special: Json) -> TextVocabulary:
    model = {**definition["model"], "vocab": text_ids}
    if model.get("type") == "Unigram":
        model["vocab"] = hide_special(definition["model"]["vocab"], set(special.values()))
    else:
        model["dropout"] = None  # would encode at random
        if model.get("byte_fallback"):
            model["unk_token"] = None  # is special, and every byte has a token
    return TextVocabulary(
        {
            **definition,
            "added_tokens": [token for token in definition["added_tokens"] if token["content"] not in special],
            "truncation": None,  # would drop the rest of a document
            "padding": None,
            "post_processor": None,
            "model": model,
        }
    )


def unusable(path: Path, why: str) -> Z2aError:
    return Z2aError(f"{path} is not a tokenizer that can be used: {why}; copy it again or train one")
