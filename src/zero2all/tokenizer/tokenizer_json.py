"""Read a ``tokenizer.json`` of any origin, and what text can become by it: its vocabulary without special tokens.

One that cannot be used is rejected before anything is built from it. Two kinds are used. A byte-level vocabulary writes
every byte as a visible character. A sentencepiece vocabulary writes characters, a space as ``▁``, and the bytes of a
character that it does not have as tokens such as ``<0xE6>``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tokenizers

from zero2all.base.errors import Z2aError
from zero2all.tokenizer.vocabulary import PATTERNS, byte_alphabet

MAX_IDS = 1 << 24  # tables have a row for every id up to the largest
SENTENCEPIECE_STEPS = ("Metaspace", "Split", "Digits")


@dataclass(frozen=True)
class TokenizerDefinition:
    """A tokenizer in Hugging Face's format."""

    text: TextVocabulary
    special_ids: dict[str, int]
    control_ids: list[int]
    """Special tokens that a model writes only to end a text: not markers such as ``<think>``, which are declared to be
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


SPACE_MARK = "▁"
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
Json = dict[str, Any]


def component_steps(component: Json | None) -> list[Json]:
    """The steps of a normalizer or pre-tokenizer, in order."""
    if component is None:
        return []
    nested = component.get("normalizers", component.get("pretokenizers"))
    return [component] if nested is None else [step for inner in nested for step in component_steps(inner)]


@dataclass(frozen=True)
class TextVocabulary:
    """A ``tokenizer.json`` without its special tokens."""

    definition: Json

    @cached_property
    def json(self) -> str:
        return json.dumps(self.definition)

    @property
    def is_sentencepiece(self) -> bool:
        return bool(self.definition["model"].get("byte_fallback"))

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each token."""
        vocabulary = self.definition["model"]["vocab"]
        if isinstance(vocabulary, dict):
            return vocabulary
        # In a unigram model, ids are positions, so special tokens keep theirs; see ``hide_special``.
        return {token: id for id, (token, _) in enumerate(vocabulary) if " " not in token}

    @property
    def merges(self) -> list[list[str]]:
        """The merges of a BPE model; a file may write each as one string."""
        merges = self.definition["model"]["merges"]
        return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]

    @cached_property
    def token_bytes(self) -> dict[int, bytes]:
        """The bytes of each id."""
        if self.is_sentencepiece:
            return {id: piece_bytes(token) for token, id in self.ids.items()}
        alphabet = byte_alphabet()
        return {id: bytes(alphabet[character] for character in token) for token, id in self.ids.items()}

    @cached_property
    def ranks(self) -> dict[bytes, int]:
        """The bytes of every token of a byte-level vocabulary to its id. Ids rise in the order of merges, so they are
        ranks too."""
        if self.is_sentencepiece:
            raise Z2aError("it is a sentencepiece vocabulary, and this needs a byte-level one")
        return {token: id for id, token in self.token_bytes.items()}

    @cached_property
    def byte_ids(self) -> list[int]:
        """The id of each byte alone."""
        if self.is_sentencepiece:
            return [self.ids[byte_token(byte)] for byte in range(256)]
        return [self.ranks[bytes([byte])] for byte in range(256)]

    @property
    def pattern(self) -> str:
        """The pre-tokenizer's regular expression, which splits text into words."""
        steps = component_steps(self.definition["pre_tokenizer"])
        if [step["type"] for step in steps] == ["Split", "ByteLevel"] and not steps[1]["use_regex"]:
            return str(steps[0]["pattern"]["Regex"])
        if [step["type"] for step in steps] == ["ByteLevel"] and steps[0]["use_regex"]:
            return PATTERNS["gpt2"]
        raise Z2aError("only Hugging Face tokenizers supports the pre-tokenizer of this tokenizer")

    @cached_property
    def space_before(self) -> Literal["never", "first", "always"]:
        """Whether a space is put before a text (sentencepiece's dummy prefix); ``always``: also before text that
        follows a special token."""
        if any(step["type"] == "Prepend" for step in component_steps(self.definition["normalizer"])):
            return "always"
        for step in component_steps(self.definition["pre_tokenizer"]):
            if step["type"] == "Metaspace":
                scheme: Literal["never", "first", "always"] = step.get("prepend_scheme", "always")
                return scheme
        return "never"

    def without_space_before(self) -> TextVocabulary:
        """The same vocabulary for text that follows other text."""
        normalizers = component_steps(self.definition["normalizer"])
        pre_tokenizers = [
            {**step, "prepend_scheme": "never"} if step["type"] == "Metaspace" else step
            for step in component_steps(self.definition["pre_tokenizer"])
        ]
        kept = [step for step in normalizers if step["type"] != "Prepend"]
        return TextVocabulary(
            {
                **self.definition,
                "normalizer": {"type": "Sequence", "normalizers": kept} if kept else None,
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizers} if pre_tokenizers else None,
            }
        )

    def normalize(self, text: str) -> str:
        """What decoding gives back of a text: all of it, but for what the format cannot tell apart."""
        for step in component_steps(self.definition["normalizer"]):
            if step["type"] in UNICODE_FORMS:
                text = getattr(tokenizers.normalizers, step["type"])().normalize_str(text)
        if self.is_sentencepiece:
            text = text.replace(SPACE_MARK, " ")
            is_metaspace = any(s["type"] == "Metaspace" for s in component_steps(self.definition["pre_tokenizer"]))
            if is_metaspace and self.space_before != "never":  # puts no space before a text that begins with one
                text = text.removeprefix(" ")
        return text


def byte_token(byte: int) -> str:
    return f"<0x{byte:02X}>"


def piece_bytes(token: str) -> bytes:
    """The bytes of a token of a sentencepiece vocabulary."""
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_MARK, " ").encode()


def hide_special(vocabulary: list[list[Any]], special_ids: set[int]) -> list[list[Any]]:
    """The vocabulary of a unigram model in which no text is a special token: a name with a space matches no text,
    because every space of a text has become ``▁``."""
    return [[f"special {id}", entry[1]] if id in special_ids else entry for id, entry in enumerate(vocabulary)]
