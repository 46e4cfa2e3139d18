"""Stories that a model generates are checked by the grammar that its corpus was generated from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zero2all.generation import StoryEvaluation, evaluate_stories, story_quality_line
from zero2all.generation import story_quality as module
from zero2all.storyworld import StoryQuality, generate_stories, story_language


def evaluate(monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> StoryEvaluation:
    """The evaluation of a model that generates these texts."""

    def generate_batch(model: Any, tokenizer: Any, prompts: list[str], *_: Any) -> list[Any]:
        assert prompts == [""] * len(texts)  # the model begins the story, in the language that it chooses
        return [SimpleNamespace(text=text) for text in texts]

    monkeypatch.setattr(module, "generate_batch", generate_batch)
    model: Any = None
    return evaluate_stories(model, model, len(texts))


def test_stories_of_the_corpus_are_right_in_both_languages(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*generate_stories("en", 3, 20), *generate_stories("zh", 3, 20)]
    quality = evaluate(monkeypatch, texts).quality
    assert (quality.stories, quality.parsed_share, quality.consistent_share) == (40, 1.0, 1.0)
    assert quality.right_sum_share == 1.0


def test_mistakes_lower_each_share(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = list(generate_stories("en", 3, 10))
    quality = evaluate(monkeypatch, [*texts[:5], *("Tom tree the. " + text for text in texts[5:])]).quality
    assert quality.parsed_share is not None
    assert 0.8 < quality.parsed_share < 1
    quality = evaluate(monkeypatch, [*texts[:5], *(text + " Zelda was there." for text in texts[5:])]).quality
    assert quality.parsed_share is not None
    assert quality.parsed_share < 1


def test_samples_are_the_first_of_a_language(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["a", "小雨", "b", "c", "小明"]
    evaluation = evaluate(monkeypatch, texts)
    assert evaluation.first_of("en", 2) == ["a", "b"]
    assert evaluation.first_of("zh", 9) == ["小雨", "小明"]
    assert [story_language(text) for text in texts] == ["en", "zh", "en", "en", "zh"]


def test_what_cannot_be_counted_is_not_a_percentage() -> None:
    line = story_quality_line(StoryQuality(2, 10, 0.943, 0.5, 0, None))
    assert line == "stories: 94% of sentences parse, 50% of stories are consistent, no sums"
