from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.base.errors import UsageError, Z2aError
from zero2all.tokenizer import Tokenizer, backends
from zero2all.tokenizer.backends import FAST_BACKENDS, Gigatoken, HuggingFace, Ids, TextVocabulary, parity_texts

NAMES = ["gigatoken", "tiktoken", "hf"]
SURROGATES = st.characters(categories=["Cs"])
# Letters, surrogates, direction marks, joined emoji, combining marks, whitespace and control characters in any order.
OFTEN = st.sampled_from("\x00\u200d\u202e\u2066\ufe0f\u0301\ufeff\U0001f468\U0001f1e8 \t\r\n'’sS0٣<|>春")
UNUSUAL_TEXT = st.text(st.one_of(st.characters(), SURROGATES, OFTEN), max_size=60)


def listed(encoded: list[Ids]) -> list[list[int]]:
    return [ids.tolist() for ids in encoded]


@pytest.fixture(scope="module")
def by_name(real_tokenizer: Tokenizer) -> dict[str, Tokenizer]:
    return {name: Tokenizer(real_tokenizer.directory, backend=name) for name in NAMES}  # type: ignore[arg-type]


def test_the_fastest_installed_backend_is_used(real_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Tokenizer(real_tokenizer.directory).backend.name == "gigatoken"
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert Tokenizer(real_tokenizer.directory).backend.name == "tiktoken"
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert Tokenizer(real_tokenizer.directory).backend.name == "hf"
    with pytest.raises(Z2aError, match=r"zero2all\[fast\]"):
        _ = Tokenizer(real_tokenizer.directory, backend="tiktoken").backend
    with pytest.raises(UsageError, match="there is no backend 'fastest'"):
        _ = Tokenizer(real_tokenizer.directory, backend="fastest").backend  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["", "12345678", "春眠不觉晓，处处闻啼鸟。"])
def test_a_backend_that_errs_on_one_text_is_not_used(
    real_tokenizer: Tokenizer, wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Erring(HuggingFace):
        name = "erring"

        def __init__(self, vocabulary: TextVocabulary, reference: HuggingFace) -> None:
            super().__init__(vocabulary)

        def encode(self, texts: list[str]) -> list[Ids]:
            return [
                np.append(ids, np.uint32(1)) if wrong == text or (wrong and wrong in text) else ids
                for text, ids in zip(texts, super().encode(texts), strict=True)
            ]

    monkeypatch.setattr(backends, "FAST_BACKENDS", {"erring": Erring})
    assert Tokenizer(real_tokenizer.directory).backend.name == "hf"
    assert "erring splits" in capsys.readouterr().err
    with pytest.raises(Z2aError, match="use backend 'auto'"):
        _ = Tokenizer(real_tokenizer.directory, backend="erring").backend  # type: ignore[arg-type]


def test_a_vocabulary_that_no_fast_backend_supports_falls_back_to_the_reference(real_tokenizer: Tokenizer) -> None:
    definition = dict(real_tokenizer.vocabulary.definition)
    definition["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}]}
    vocabulary = TextVocabulary(definition)
    reference = HuggingFace(vocabulary)
    assert backends.choose_backend("auto", vocabulary, reference) is reference
    for name in FAST_BACKENDS:
        with pytest.raises(Z2aError, match=f"{name} cannot be used here"):
            backends.choose_backend(name, vocabulary, reference)  # type: ignore[arg-type]


def test_every_document_has_the_same_ids_and_round_trips(
    by_name: dict[str, Tokenizer], real_texts: dict[str, list[str]]
) -> None:
    for texts in real_texts.values():
        expected = listed(by_name["hf"].encode_batch(texts))
        assert [by_name["hf"].decode(ids) for ids in expected] == texts
        for name in FAST_BACKENDS:
            assert listed(by_name[name].encode_batch(texts)) == expected, name
            assert [by_name[name].decode(ids) for ids in expected] == texts, name


def test_unusual_text_has_the_same_ids_on_every_backend(by_name: dict[str, Tokenizer]) -> None:
    @settings(max_examples=400, deadline=None, derandomize=True)
    @given(st.lists(UNUSUAL_TEXT, max_size=4))
    def check(texts: list[str]) -> None:
        expected = [by_name["hf"].encode(text) for text in texts]
        for name in NAMES:
            assert listed(by_name[name].encode_batch(texts)) == expected
        for text, ids in zip(texts, expected, strict=True):
            if not any("\ud800" <= character <= "\udfff" for character in text):
                assert by_name["hf"].decode(ids) == text

    check()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("text", "meant"),
    [("a\ud800b", "a\ufffdb"), ("\udc00", "\ufffd"), ("\ud83d\ude00", "😀"), ("\ude00\ud83d", "\ufffd" * 2)],
)
def test_surrogates_mean_the_same_on_every_backend(
    by_name: dict[str, Tokenizer], name: str, text: str, meant: str
) -> None:
    tokenizer = by_name[name]
    for ids in (tokenizer.encode(text), *listed(tokenizer.encode_batch(["before", text, "after"]))[1:2]):
        assert tokenizer.decode(ids) == meant


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [lambda: "春眠不觉晓处处闻啼鸟" * 35_000, lambda: " " * 1_000_000, lambda: "aB3\x00" * 250_000]
)
def test_lines_of_a_megabyte(by_name: dict[str, Tokenizer], make: Callable[[], str]) -> None:
    text = make()
    expected = by_name["hf"].encode(text)
    assert by_name["hf"].decode(expected) == text
    for name in NAMES[:2]:
        assert by_name[name].encode_batch([text])[0].tolist() == expected


def test_any_bytes_round_trip(by_name: dict[str, Tokenizer]) -> None:
    rng = random.Random(3)
    strings = [rng.randbytes(rng.randint(0, 100)) for _ in range(1000)]
    strings += ["春眠".encode()[:cut] + "不觉晓 ok".encode()[-cut:] for cut in range(1, 6)]
    strings += [b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf", bytes(range(256))]
    for data in strings:
        ids = by_name["hf"].encode_bytes(data)
        assert by_name["hf"].decode_bytes(ids) == data
    assert by_name["hf"].encode_bytes("春眠 and text".encode()) == by_name["hf"].encode("春眠 and text")


def test_the_memory_of_gigatoken_is_freed_and_ids_stay(
    real_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gigatoken, "RENEW_AFTER", 100)
    backend = Gigatoken(real_tokenizer.vocabulary, real_tokenizer.reference)
    first, texts = backend._tokenizer, parity_texts(real_tokenizer.vocabulary)
    expected = listed(real_tokenizer.reference.encode(texts))
    assert listed(backend.encode(texts)) == expected
    assert backend._tokenizer is first
    assert listed(backend.encode(texts)) == expected
    assert backend._tokenizer is not first


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda tokenizer: pickle.loads(pickle.dumps(tokenizer))])
def test_a_copy_is_the_same(real_tokenizer: Tokenizer, twin: Callable[[Any], Any]) -> None:
    _ = real_tokenizer.backend  # made before the copy, and not part of it
    other = twin(real_tokenizer)
    assert other.fingerprint == real_tokenizer.fingerprint
    assert other.encode("春眠 <|pad|>") == real_tokenizer.encode("春眠 <|pad|>")
    assert listed(other.encode_batch(["a b"])) == listed(real_tokenizer.encode_batch(["a b"]))
