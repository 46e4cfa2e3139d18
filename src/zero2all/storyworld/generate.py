"""The languages of the story world, and its stories as a function of seed, language and number."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

from zero2all.base.errors import UsageError
from zero2all.storyworld.language import Language, chinese_words, english_words, read_toml
from zero2all.storyworld.plots import CHINESE_PLOTS, ENGLISH_PLOTS, cast
from zero2all.storyworld.teller import PLOT_PREFERENCE, Teller

LANGUAGES = ("en", "zh")
"""The languages of the stories."""


def story_language(text: str) -> str:
    """The language of a story: Chinese if it has Han characters."""
    return "zh" if any("\u4e00" <= character <= "\u9fff" for character in text) else "en"


@cache
def get_language(name: str) -> Language:
    """The language `en` or `zh`."""
    if name == "en":
        words = english_words(read_toml("en", "words"))
        return Language("en", words, ENGLISH_PLOTS, separator=" ", length=(40, 110), measure=_count_words)
    if name == "zh":
        words = chinese_words(read_toml("zh", "words"))
        return Language("zh", words, CHINESE_PLOTS, separator="", length=(60, 170), measure=len)
    raise UsageError(f"no stories in language {name!r}: use en or zh")


def _count_words(text: str) -> int:
    return len(text.split())


def generate_story(language: str, seed: int, number: int) -> str:
    """Story `number` of a seed, in `en` or `zh`. It is the same in every process and every version of Python."""
    grammar = get_language(language)
    shortest, longest = grammar.length
    for attempt in itertools.count():
        teller = Teller(grammar, f"{seed}/{language}/{number}/{attempt}")
        cast(teller)
        teller.prefer(grammar.plots, PLOT_PREFERENCE)(teller)
        text = teller.text()
        if shortest <= grammar.measure(text) <= longest:
            break
    return text


def generate_stories(language: str, seed: int, count: int | None = None) -> Iterator[str]:
    """The first `count` stories of a seed, or stories without end.

    >>> first, second = generate_stories("en", seed=7, count=2)
    """
    for number in itertools.count() if count is None else range(count):
        yield generate_story(language, seed, number)
