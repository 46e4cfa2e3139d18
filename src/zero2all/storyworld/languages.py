"""The languages of the story world."""

from __future__ import annotations

from functools import cache

from zero2all.errors import UsageError
from zero2all.storyworld.language import Language, read_toml
from zero2all.storyworld.plots import CHINESE_PLOTS, ENGLISH_PLOTS
from zero2all.storyworld.words import chinese_words, english_words

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
