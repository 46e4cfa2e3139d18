"""Stories as a function of seed, language and number."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from zero2all.storyworld.languages import get_language
from zero2all.storyworld.plots import cast
from zero2all.storyworld.teller import PLOT_PREFERENCE, Teller


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
