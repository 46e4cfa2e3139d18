"""Encoding backends that give the same ids at different speeds: HF ``tokenizers`` is the reference, others are faster.

A backend never sees a special token: it is built from the text vocabulary alone. It is used only after it has produced
the ids of the reference on texts that are known to expose differences, on this very vocabulary.
"""

from __future__ import annotations

import multiprocessing
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np
import tokenizers

from zero2all.base.console import warn
from zero2all.base.errors import UsageError, Z2aError, need
from zero2all.base.tasks import available_cores
from zero2all.tokenizer.tokenizer_json import TextVocabulary

Ids = np.ndarray[Any, np.dtype[np.uint32]]
"""The token ids of one text."""
BackendName = Literal["auto", "gigatoken", "tiktoken", "hf"]


class Encoder(Protocol):
    name: str

    def encode(self, texts: list[str]) -> list[Ids]:
        """The ids of each text. Raises TypeError or UnicodeError on text that has no UTF-8 form."""


class HuggingFace:
    name = "hf"

    def __init__(self, vocabulary: TextVocabulary) -> None:
        with _panics_as_errors():
            try:
                self.tokenizer = tokenizers.Tokenizer.from_str(vocabulary.json)
            except Exception as error:
                raise Z2aError(f"Hugging Face tokenizers cannot load it ({error})") from error

    def encode(self, texts: list[str]) -> list[Ids]:
        with _panics_as_errors():
            encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        # Through an array: numpy takes three times as long to convert a list of numbers.
        return [np.frombuffer(array("I", one.ids), np.uint32) for one in encoded]


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """A Rust panic, as of a regular expression that backtracks too far, is no ``Exception`` in Python."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = str(error).splitlines()[0]
        raise Z2aError(f"the tokenizer failed ({reason}): check the pattern of its pre-tokenizer") from error


class Tiktoken:
    """Three to five times the reference."""

    name = "tiktoken"

    def __init__(self, vocabulary: TextVocabulary, reference: HuggingFace) -> None:
        tiktoken = need("tiktoken", "fast")
        self._reference = reference
        if vocabulary.definition["normalizer"] is not None:
            raise Z2aError("this tokenizer normalizes text, which tiktoken cannot")
        # Its call that returns arrays looks for special tokens, and with none to look for it stops at every character.
        # So it gets one that is never allowed: also a text that holds it stays text.
        never = {"<|never allowed|>": 1 + max(vocabulary.ranks.values())}
        self._encoding = tiktoken.Encoding(
            "zero2all", pat_str=vocabulary.pattern, mergeable_ranks=vocabulary.ranks, special_tokens=never
        )
        # The thread that is first to use its regular expressions owns them, and while an owner works, others wait for
        # its cache line at every word: 1.6x the time. So the owner is a thread that does not encode.
        self._encoding.encode_ordinary("".join(TRICKY_TEXTS))
        self._threads = ThreadPoolExecutor(_threads())

    def encode(self, texts: list[str]) -> list[Ids]:
        return list(self._threads.map(self._encode_one, texts))

    def _encode_one(self, text: str) -> Ids:
        try:
            ids: Ids = self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeError:
            raise
        except ValueError:  # its regular expressions fail on a million consecutive spaces
            return self._reference.encode([text])[0]
        return ids


class Gigatoken:
    """Seven to fifty times the reference: it caches every word it has encoded, which is why it must be renewed."""

    name = "gigatoken"
    RENEW_AFTER = 75_000_000  # tokens, some 300 MB of text: Chinese has then filled about 600 MB

    def __init__(self, vocabulary: TextVocabulary, reference: HuggingFace) -> None:
        self._make_tokenizer: Callable[[], Any] = lambda: need("gigatoken", "fast").Tokenizer.from_json(vocabulary.json)
        self._tokenizer = self._make_tokenizer()
        self._encoded = 0

    def encode(self, texts: list[str]) -> list[Ids]:
        if self._encoded > self.RENEW_AFTER:
            del self._tokenizer  # before the new one, or both would be in memory
            self._tokenizer, self._encoded = self._make_tokenizer(), 0
        rows = self._tokenizer.encode_batch(texts).layout
        ids: Ids = rows.content.data
        bounds = rows.offsets.data.tolist()
        self._encoded += bounds[-1]
        return [ids[start:stop] for start, stop in pairwise(bounds)]


# The fastest first.
FAST_BACKENDS: dict[str, Callable[[TextVocabulary, HuggingFace], Encoder]] = {
    "gigatoken": Gigatoken,
    "tiktoken": Tiktoken,
}


def choose_backend(wanted: BackendName, vocabulary: TextVocabulary, reference: HuggingFace) -> Encoder:
    """The backend of that name, or the fastest one installed; in either case one that passed the parity check."""
    if wanted not in ("auto", "hf", *FAST_BACKENDS):
        raise UsageError(f"there is no backend {wanted!r}: use auto, hf, {', '.join(FAST_BACKENDS)}")
    if vocabulary.is_sentencepiece and wanted == "auto":
        return reference
    for name in FAST_BACKENDS if wanted == "auto" else {wanted} & set(FAST_BACKENDS):
        try:
            with _panics_as_errors():
                backend = FAST_BACKENDS[name](vocabulary, reference)
                difference = first_difference(backend, reference, parity_texts(vocabulary))
        except Exception as error:  # not installed, or not made for this vocabulary: each library has its own errors
            if wanted == name:
                raise Z2aError(f"{name} cannot be used here: {error}") from error
            continue
        if difference is None:
            return backend
        message = f"{name} splits {difference[:40]!r} differently from Hugging Face tokenizers"
        if wanted == name:
            raise Z2aError(f"{message}: use backend 'auto'")
        warn(f"{message}, so it is not used for this vocabulary")
    return reference


def first_difference(backend: Encoder, reference: Encoder, texts: Sequence[str]) -> str | None:
    """The first text that two backends encode differently, or None."""
    pairs = zip(texts, backend.encode(list(texts)), reference.encode(list(texts)), strict=True)
    return next((text for text, ours, theirs in pairs if not np.array_equal(ours, theirs)), None)


# Where encoders have been seen to disagree: whitespace before words and newlines, contractions, digits, combining
# marks, letters outside the BMP, joined emoji, direction marks, and the text of special tokens.
TRICKY_TEXTS = (
    *("", " ", "  ", "a  b", "\n", "\r\n\r\n", " \n \n", "\t\tx", "   indented\n    more\n", "x \u3000 y", "\u00a0z"),
    *("it's IT'S we'LL they'Ve 'tis ſ's", "1 12 123 1234 12345678", "３.１４ ٣٤ Ⅷ ½", "e\u0301 ñ ǅ", "a_b-c/d\\e//**#"),
    *("春眠不觉晓，处处闻啼鸟。", "混合English和中文123个", "“引号”——……！？", "こんにちは 안녕 สวัสดี नमस्ते", "𠀀𪚥 𝔘𝔫𝔦"),
    *("\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd \U0001f1e8\U0001f1f3", "\u202eabc\u202c \u200f"),
    *("\ufeffBOM", "a\x00b\x7f\x1b[0m", "\ufffd\uffff", "<|endoftext|><|im_start|>user\n", "https://a.b/c?d=e&f=%20#g"),
    *("def f(x):\n    return {'a': [x + 1]}  # 注释\n\n\n", "aaaaaaaa" * 40, " " * 300, "ha" * 99),
)


def parity_texts(vocabulary: TextVocabulary) -> list[str]:
    """Texts to compare backends on: tricky ones, random bytes decoded as text, and random sequences of tokens."""
    rng = random.Random(0)
    noise = [rng.randbytes(rng.randint(1, 60)).decode("utf-8", "replace") for _ in range(100)]
    planes = [*range(0xD800), *range(0xE000, 0x20000, 7)]
    anything = ["".join(chr(rng.choice(planes)) for _ in range(20)) for _ in range(50)]
    tokens = list(vocabulary.token_bytes.values())
    rows = [b"".join(rng.choices(tokens, k=20)).decode("utf-8", "replace") for _ in range(100)]
    return [*TRICKY_TEXTS, *noise, *anything, *rows]


def _threads() -> int:
    """All cores, but only one in a worker process, where the other workers use the rest."""
    return 1 if multiprocessing.parent_process() else available_cores()
