"""Reading costs time in proportion to a file's size, whatever is in it: measured in CPU seconds, by growth."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zero2all.corpus.readers import BrokenRecord, RawFile, read_records
from zero2all.corpus.readers.formats import guess_format
from zero2all.corpus.readers.json_records import _NEXT_OBJECT
from zero2all.corpus.readers.plain_text import parse_attributes
from zero2all.corpus.readers.web_pages import inline_templates

SMALL = 40_000  # characters; quadratic patterns took seconds here, the exponential one years
GROWTH, FLOOR = 8, 0.4  # four times the size may take this many times the time, and this many seconds besides


def seconds(function: Callable[[], object]) -> float:
    begun = time.process_time()
    function()
    return time.process_time() - begun


def repeated(piece: str, size: int) -> str:
    return piece * (size // len(piece))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("function", "head", "piece"),
    [
        (lambda text: guess_format("page.txt", text.encode()), "", "<!-- a licence -->\n"),
        (lambda text: guess_format("page.txt", text.encode()), "", "<!-- "),
        (lambda text: guess_format("page.txt", text.encode()), "", '<?xml version="1.0"?>\n'),
        (inline_templates, "", "<script type=text/html>"),
        (inline_templates, "", "<script "),
        (inline_templates, "<script ", "type=text/"),
        (parse_attributes, "", "a"),
        (parse_attributes, "", 'a="'),
        (parse_attributes, "", 'a=" '),
        (parse_attributes, 'a="', '"' + " " * 50),
        (_NEXT_OBJECT.search, "", "\n"),
        (_NEXT_OBJECT.search, "", "}  "),
    ],
)
def test_patterns_are_linear(function: Callable[[str], object], head: str, piece: str) -> None:
    once = seconds(lambda: function(head + repeated(piece, SMALL)))
    assert once < 2
    assert seconds(lambda: function(head + repeated(piece, 4 * SMALL))) < GROWTH * once + FLOOR


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("head", "piece"),
    [
        ("[", "{bad},"),  # broken elements, each alone
        ("[", "\n" * 100 + "{bad"),
        ("[", '{"a":['),  # nesting without an end
        ("[1,", "\n"),
    ],
)
def test_broken_arrays_are_linear(tmp_path: Path, head: str, piece: str) -> None:
    def read(size: int) -> None:
        (tmp_path / "a.json").write_text(head + repeated(piece, size) + '\n{"text": "the last one"}]')
        records = list(read_records(RawFile.from_path(tmp_path / "a.json")))
        assert not isinstance(records[-1], BrokenRecord)

    once = seconds(lambda: read(SMALL))
    assert once < 4
    assert seconds(lambda: read(4 * SMALL)) < GROWTH * once + FLOOR


def test_pages_behind_comments_are_still_known_as_html() -> None:
    for head in ("", "<!-- a -->\n<!-- b - -- > -->", '<?xml version="1.0"?>\n<!-- a\n-->\n', "  \n"):
        assert guess_format("page.txt", f"{head}<!DOCTYPE html>\n<p>".encode()) == "html"
        assert guess_format("page.txt", f"{head}<html lang=en>".encode()) == "html"
        assert guess_format("page.txt", f"{head}<htmlx>".encode()) == "text"
    assert guess_format("page.txt", b"<!-- <html> ") == "text"


def test_templates_take_the_place_of_their_scripts() -> None:
    page = (
        '<p>a</p><SCRIPT id=1 type="text/x-template"><b>x</b><script></SCRIPT><p>b</p><script type=text/html>y</script>'
    )
    assert inline_templates(page) == "<p>a</p><b>x</b><script><p>b</p>y"
    for other in ("<script>x</script>", "<script type=text/javascript>x</script>", "<script type=text/html>x", "x"):
        assert inline_templates(other) == other


def test_attributes_are_those_of_the_pattern_that_says_what_they_are() -> None:
    slow = re.compile(r'([\w-]+)="(.*?)"(?=\s+[\w-]+="|\s*$)')
    rng = random.Random(7)
    pieces = ['id="1"', 'title="a "b" c"', 'title=""', 'x-y="é"', " ", "  ", 'url="http://a?b=c"', 'note="d="e" f"']
    for _ in range(2000):
        text = " ".join(rng.choice(pieces) for _ in range(rng.randrange(6)))
        assert list(parse_attributes(text)) == slow.findall(text), text
    assert list(parse_attributes('junk id="1" title="unfinished')) == [("id", "1")]
