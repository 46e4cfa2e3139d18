"""A pattern of one's own: refused with a reason, or used by training and every encoder."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest
import regex

from zero2all.base.errors import RecipeError, UsageError
from zero2all.recipe import TokenizerRecipe, parse_recipe
from zero2all.tokenizer import Tokenizer, pattern_check, train, train_tokenizer
from zero2all.tokenizer.backends import TRICKY_TEXTS
from zero2all.tokenizer.pattern_check import check_pattern, find_problem
from zero2all.tokenizer.vocabulary import PATTERNS
from zero2all.tokenizer.word_count import SPLIT_CHARACTERS, split_words

OWN = r"[A-Za-z]+|\p{L}|\p{N}|[^\p{L}\p{N}]"  # each Han character is a word


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a", "not a regular expression"),
        (r"\w+|\s+", r"does not match U\+0027"),
        (r"\w*|\W", r"does not match U\+0020"),  # it matches nothing before each space
        (r"[^\u3000]+", r"does not match U\+3000"),
        (r"[\s\S]{2}", "does not match"),
        (r"(a+)+b|[\s\S]", "backtracks too far"),
        (r"(?:a|aa)+$|[\s\S]", "backtracks too far"),
        (r"\s*x|\s|\S+", "more than linear time"),
        (r"(?=.*x)a|[\s\S]", "more than linear time"),
    ],
)
def test_a_pattern_that_loses_text_or_backtracks_is_refused(pattern: str, reason: str) -> None:
    assert regex.search(reason, find_problem(pattern) or "")


def test_a_pattern_that_never_ends_is_refused_in_bounded_time() -> None:
    """Before the child process reaches its limit of CPU time, and without taking this process with it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(UsageError, match=r"the pattern .* cannot be used: it backtracks too far"):
        check_pattern(r"(a+)+b|[\s\S]")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < pattern_check.CPU_SECONDS + 5


def test_a_child_that_is_killed_refuses_the_pattern(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    endless = tmp_path / "python"
    endless.write_text(f"#!/bin/sh\nulimit -t 1\nexec {sys.executable} -c 'while True: pass'\n")
    endless.chmod(0o755)
    monkeypatch.setattr(pattern_check.sys, "executable", str(endless))
    with pytest.raises(UsageError, match="simplify it"):
        check_pattern("a|[^a]")
    with pytest.raises(UsageError, match="at most 4096"):
        check_pattern("a" * 5000)


@pytest.mark.long
@pytest.mark.parametrize("pattern", [*PATTERNS.values(), OWN])
def test_good_patterns_pass(pattern: str) -> None:
    check_pattern(pattern)


def test_words_are_those_of_the_encoder() -> None:
    long = "春眠 " * SPLIT_CHARACTERS
    for text in (*TRICKY_TEXTS, long):
        words = [word for part in split_words(OWN, [text]) for word in part]
        assert "".join(words) == text
        assert words == regex.findall(OWN, text)


def test_a_tokenizer_is_trained_with_a_pattern_of_ones_own(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    monkeypatch.setattr(train, "check_pattern", checked.append)
    recipe = TokenizerRecipe(vocab_size=512, min_frequency=1, pattern=OWN)
    made = train_tokenizer(recipe, workspace / "documents", tmp_path / "t")
    assert checked == [OWN]
    assert made.pattern == OWN
    assert train_tokenizer(recipe, workspace / "documents", tmp_path / "t").reused
    tokenizer = Tokenizer(tmp_path / "t")
    learned = [tokenizer.token_bytes[id] for id in range(256, made.learned)]
    assert b"model" in learned
    assert all(len(regex.findall(OWN, token.decode("utf-8", "ignore"))) <= 1 for token in learned)
    for name in ("hf", "tiktoken"):
        other = Tokenizer(tmp_path / "t", backend=name)  # type: ignore[arg-type]
        for text in TRICKY_TEXTS:
            assert other.encode_batch([text])[0].tolist() == tokenizer.encode(text)
            assert tokenizer.decode(tokenizer.encode(text)) == text
    other_recipe = TokenizerRecipe(vocab_size=512, min_frequency=1)
    with pytest.raises(UsageError, match="not replaced"):
        train_tokenizer(other_recipe, workspace / "documents", tmp_path / "t", before_replace=refuse)


def refuse() -> None:
    raise UsageError("not replaced")


def test_a_refused_pattern_leaves_nothing_behind(workspace: Path, tmp_path: Path) -> None:
    recipe = TokenizerRecipe(vocab_size=512, pattern=r"\w+")
    with pytest.raises(UsageError, match="does not match"):
        train_tokenizer(recipe, workspace / "documents", tmp_path / "t")
    assert not list(tmp_path.iterdir())


def test_keys_that_do_not_fit_are_mistakes_of_the_recipe() -> None:
    with pytest.raises(RecipeError, match="must be zh-en-code, qwen2, gpt2, or a regular expression"):
        parse_recipe("tokenizer: {pattern: qwen3}")
    with pytest.raises(RecipeError, match="pattern needs trainer: zero2all"):
        parse_recipe("tokenizer: {trainer: sentencepiece-bpe, pattern: '.'}")
