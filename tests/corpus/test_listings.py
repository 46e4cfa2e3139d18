"""Fenced listings: one pass over the text, equal to the plain pattern where fences have one length."""

import random
import re
import time

from zero2all.corpus.filters.text_kinds import split_listings, strip_html_comments

PLAIN = re.compile(r"(^[ \t]{0,8}(`{3,}|~{3,})[^\n]*\n(?:.*?\n)??[ \t]{0,8}\2[^\n]*$)", re.MULTILINE | re.DOTALL)


def test_equal_to_the_pattern() -> None:
    rng = random.Random(0)
    lines = ["```", "~~~", "```python", "  ```", "text", "", "~~", "`code`", "    ~~~ end"]
    for _ in range(2000):
        text = "\n".join(rng.choices(lines, k=rng.randrange(12)))
        pieces = PLAIN.split(text)
        assert split_listings(text) == [piece for number, piece in enumerate(pieces) if number % 3 != 2], text


def test_a_longer_fence_contains_a_shorter_one() -> None:
    text = "a\n````\n```\nx\n```\n````\nb"
    assert split_listings(text) == ["a\n", "````\n```\nx\n```\n````", "\nb"]
    assert split_listings("````\nx\n```") == ["````\nx\n```"]


def test_thousands_of_openings() -> None:
    text = "".join("`" * (20_000 - number) + "\n" for number in range(0, 19_990, 10)) + "~~~ x\n"
    begin = time.process_time()
    assert split_listings(text)[0] == text
    assert time.process_time() - begin < 5


def test_comments() -> None:
    assert strip_html_comments("a<!-- x -->  \nb<!-- y -->c<!-- open") == "abc<!-- open"
    assert strip_html_comments("<!-->x-->y") == "y"
    assert strip_html_comments("-->a<!--") == "-->a<!--"
