"""A damaged tokenizer.json is refused in one line that names the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zero2all.base.errors import Z2aError
from zero2all.tokenizer import Tokenizer

Definition = dict[str, Any]


REMOVED = object()


def with_(value: Any, *keys: str | int) -> Callable[[Definition], Any]:
    def change(definition: Definition) -> Definition:
        parent: Any = definition
        for key in keys[:-1]:
            parent = parent[key]
        parent[keys[-1]] = value
        if value is REMOVED:
            del parent[keys[-1]]
        return definition

    return change


def without(*keys: str) -> Callable[[Definition], Any]:
    return with_(REMOVED, *keys)


def missing_merged_token(definition: Definition) -> Definition:
    """The vocabulary lacks a token that a merge makes."""
    vocabulary = definition["model"]["vocab"]
    del vocabulary[max((token for token in vocabulary if not token.startswith("<")), key=lambda t: vocabulary[t])]
    return definition


DAMAGES: dict[str, Callable[[Definition], Any]] = {
    "a list": lambda definition: [definition],
    "a number": lambda definition: 3,
    "no model": without("model"),
    "no vocabulary": without("model", "vocab"),
    "vocabulary is a list": with_([["a", 1]], "model", "vocab"),
    "empty vocabulary": with_({}, "model", "vocab"),
    "no added tokens": without("added_tokens"),
    "added tokens are numbers": with_([1, 2], "added_tokens"),
    "an id that is text": with_("7", "added_tokens", 0, "id"),
    "a negative id": with_(-1, "added_tokens", 0, "id"),
    "an id that is a boolean": with_(True, "model", "vocab", "a"),
    "an id of a billion": with_(10**9, "added_tokens", 0, "id"),
    "two tokens of one id": with_(5, "model", "vocab", "a"),
    "a token outside the byte alphabet": with_(700, "model", "vocab", "\u4e2d"),
    "no end of text": with_([], "added_tokens"),
    "no pre-tokenizer": without("pre_tokenizer"),
    "a pre-tokenizer that is text": with_("x", "pre_tokenizer"),
    "a token missing that merges make": missing_merged_token,
    "another model": with_("WordPiece", "model", "type"),
    "merges are numbers": with_([1], "model", "merges"),
    "an empty file": lambda _: b"",
    "half a definition": lambda _: b"{",
    "not UTF-8": lambda _: b"\xff\xfe",
    "deep lists": lambda _: b"[" * 100_000,
}


@pytest.fixture
def tokenizer(workspace: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(workspace / "tokenizer", tmp_path / "tokenizer"))


def use(directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    ids = tokenizer.encode("春 the def")
    assert tokenizer.decode([*ids, tokenizer.eos_token_id])
    tokenizer.encode_batch(["a"])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_definition_is_refused_by_name(tokenizer: Path, name: str) -> None:
    use(tokenizer)
    path = tokenizer / "tokenizer.json"
    damaged = DAMAGES[name](json.loads(path.read_text("utf-8")))
    path.write_bytes(damaged if isinstance(damaged, bytes) else json.dumps(damaged).encode())
    with pytest.raises(Z2aError, match=r"tokenizer\.json") as raised:
        use(tokenizer)
    assert "\n" not in str(raised.value)


def test_a_pattern_that_backtracks_without_end_is_an_error(tokenizer: Path) -> None:
    """The library's own regular expressions give up by a Rust panic, which is no ordinary exception."""
    path = tokenizer / "tokenizer.json"
    definition = json.loads(path.read_text("utf-8"))
    definition["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"(?:a+)+(?=b)|(?:a|aa)+$(?!x)"
    path.write_text(json.dumps(definition), encoding="utf-8")
    with pytest.raises(Z2aError, match="pre-tokenizer"):
        Tokenizer(tokenizer).encode("a" * 5000 + "c")


def test_a_tokenizer_of_others_encodes_without_our_end_of_text(tokenizer: Path) -> None:
    """Llama 3 says <|end_of_text|>: it can be inspected and compared, but makes no token store."""
    path = tokenizer / "tokenizer.json"
    path.write_text(path.read_text("utf-8").replace("<|endoftext|>", "<|end_of_text|>"), encoding="utf-8")
    theirs = Tokenizer(tokenizer)
    assert theirs.decode(theirs.encode("the 春")) == "the 春"
    with pytest.raises(Z2aError, match=r"tokenizer\.json has no special token <\|endoftext\|>"):
        _ = theirs.eos_token_id
