"""What text can become: the vocabulary of a ``tokenizer.json`` without its special tokens.

Two kinds are used. A byte-level vocabulary writes every byte as a visible character. A sentencepiece vocabulary writes
characters, a space as ``▁``, and the bytes of a character that it does not have as tokens such as ``<0xE6>``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import tokenizers

from zero2all.errors import Z2aError
from zero2all.tokenizer.vocabulary import PATTERNS, byte_alphabet

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
        # Of a unigram model ids are positions, so special tokens keep theirs; see ``hide_special``.
        return {token: id for id, (token, _) in enumerate(vocabulary) if " " not in token}

    @property
    def merges(self) -> list[list[str]]:
        """Of a BPE model; a file may write each as one string."""
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
