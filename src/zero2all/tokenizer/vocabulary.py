"""What every vocabulary shares: pre-tokenizer patterns, byte alphabet, chat template, and special tokens in text.

The ids of a vocabulary, from 0 on: the 256 bytes, the learned tokens, ``SPECIAL_TOKENS``, and reserved names up to the
requested size.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Literal

from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.package_data import read_package_text

END_OF_TEXT = "<|endoftext|>"  # ends a document
START_OF_TEXT = "<|startoftext|>"
PAD = "<|pad|>"
UNKNOWN = "<unk>"  # sentencepiece must have it; no text becomes it, because every byte has a token
IM_START, IM_END = "<|im_start|>", "<|im_end|>"  # around a message, its role on the first line
# Named as in Hermes and Qwen, so that servers with a parser for those find the calls of our models.
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
TOOL_RESPONSE, TOOL_RESPONSE_END = "<tool_response>", "</tool_response>"
FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX = "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"  # fill in the middle
FIM_PAD = "<|fim_pad|>"
NAMED_TOKENS = (
    END_OF_TEXT, START_OF_TEXT, PAD, IM_START, IM_END,
    TOOL_CALL, TOOL_CALL_END, TOOL_RESPONSE, TOOL_RESPONSE_END,
    FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX, FIM_PAD,
)  # fmt: skip


def reserved_tokens(number: int) -> tuple[str, ...]:
    """Names without a meaning yet: a model can learn one later without a new embedding row."""
    return tuple(f"<|reserved_{n}|>" for n in range(number))


SPECIAL_TOKENS = NAMED_TOKENS + reserved_tokens(32 - len(NAMED_TOKENS))

# Patterns that split text into words; merges are learned and applied inside a word. Every character belongs to some
# word. Fast backends support each of these patterns, so none of them may be changed once a model uses it.
PATTERNS = {
    # Digits in groups of up to three, contractions, one leading space or mark with a word, punctuation with the
    # newlines after it, runs of newlines with the whitespace before them, and indentation except its last space.
    "zh-en-code": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    # The same with single digits, as in Qwen 2.
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    # Numbers of any length are words, only a space joins the word after it, newlines are ordinary whitespace.
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}

# Without the comment at its start, which is for readers of the file.
CHAT_TEMPLATE = read_package_text(__package__, "chat_template.jinja").partition("-#}\n")[2]


def byte_alphabet() -> dict[str, int]:
    """The visible character of each byte in byte-level vocabularies: itself if printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


AllowSpecial = Literal["none", "raise", "all"] | AbstractSet[str]
"""What the text of a special token means: text; an error; the token; or the token if its name is in the set."""


def allowed_names(allow: AllowSpecial, names: Collection[str], texts: list[str]) -> frozenset[str]:
    """The special tokens that may be parsed in these texts."""
    if allow == "none":
        return frozenset()
    if allow == "all":
        return frozenset(names)
    if allow == "raise":
        for text in texts:
            if len(parts := split_special(text, frozenset(names))) > 1:
                raise Z2aError(
                    f"the text contains {parts[1]!r}, which is the name of a special token: "
                    "remove it, or encode it as text with allow_special='none'"
                )
        return frozenset()
    if isinstance(allow, str) or (unknown := set(allow) - set(names)):
        wrong = allow if isinstance(allow, str) else ", ".join(sorted(unknown))
        raise UsageError(f"allow_special is 'none', 'raise', 'all' or a set of special tokens, not {wrong!r}")
    return frozenset(allow)


def split_special(text: str, names: frozenset[str]) -> list[str]:
    """Text, name, text, name, ..., text: the texts have even indices and may be empty."""
    return _pattern(names).split(text) if names else [text]


@lru_cache(maxsize=64)
def _pattern(names: frozenset[str]) -> re.Pattern[str]:
    # Longer names first, or one that begins another would hide it.
    return re.compile("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")")
