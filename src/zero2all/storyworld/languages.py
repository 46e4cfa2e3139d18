"""The languages of the story world."""

from __future__ import annotations

from functools import cache

from zero2all.errors import UsageError
from zero2all.storyworld.chinese.plots import CHINESE_PLOTS
from zero2all.storyworld.chinese.words import chinese_words
from zero2all.storyworld.english.plots import ENGLISH_PLOTS
from zero2all.storyworld.english.words import english_words
from zero2all.storyworld.language import Language

LANGUAGES = ("en", "zh")
"""The languages of the stories."""


def story_language(text: str) -> str:
    """The language of a story: Chinese if it has Han characters."""
    return "zh" if any("\u4e00" <= character <= "\u9fff" for character in text) else "en"


@cache
def get_language(name: str) -> Language:
    """The language `en` or `zh`."""
    if name == "en":
        return Language(
            name="en",
            package="zero2all.storyworld.english",
            words=english_words(),
            plots=ENGLISH_PLOTS,
            separator=" ",
            length=(40, 110),
            measure=lambda text: len(text.split()),
        )
    if name == "zh":
        return Language(
            name="zh",
            package="zero2all.storyworld.chinese",
            words=chinese_words(),
            plots=CHINESE_PLOTS,
            separator="",
            length=(60, 170),
            measure=len,
        )
    raise UsageError(f"no stories in language {name!r}: use en or zh")
