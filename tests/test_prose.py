"""The prose of the documentation is short: words, sentences, and phrases that nobody of this field writes."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.test_docs import ENGLISH, FENCE, ROOT

GENERATED = {f"docs/reference/{name}.md" for name in ("cli", "errors", "plugins", "python", "recipe")}
# Process, policy and history, or another project's rules: nobody reads them to learn how to use zero2all.
OTHER = {"CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "AGENTS.md"}
WRITTEN = [page for page in ENGLISH if page not in GENERATED | OTHER and not page.startswith(("contrib/", "."))]
SHORT_FOLDERS = ("docs/how-to/", "docs/start/", "docs/explain/")
MAX_WORDS, MAX_PAGE_WORDS = 72_700, 900  # the goal is 60,000: lower it with every page that becomes shorter
MAX_SENTENCE_WORDS, MAX_LONG_SENTENCES, MAX_SEMICOLONS = 30, 0.03, 1 / 500
# Pages that may be longer, with the number of words and the reason.
LONGER = {
    "docs/explain/bpe.md": (
        960,
        "the algorithm, a worked example of all its merges, and the memory of training",
    ),
}
PRONOUNS = re.compile(r"\b(?:that|those) of\b", re.IGNORECASE)
REFUSED = re.compile(r"\b(?:is|are) refused\b", re.IGNORECASE)


def plain(text: str) -> str:
    """The sentences of a page: without code, tables, comments and targets of links."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", text), flags=re.DOTALL)
    text = re.sub(r"^ *\|.*$|^#.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"<[^>\n]+>|!\[[^\]]*\]\([^)]*\)", "", text)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"(`+)(?!`).+?(?<!`)\1", "X", text, flags=re.DOTALL))


def sentences(text: str) -> list[str]:
    """A list element is one too, and what comes before a colon at the end of a line."""
    blocks = re.split(r"\n\s*\n|\n(?= *(?:[-*!>]|\d+\.|\[\^) )", text)
    joined = (" ".join(re.sub(r"^ *(?:[-*>]|\d+\.) +", "", block).split()) for block in blocks)
    return [one for block in joined for one in re.split(r"(?<=[.!?])[\"”)*_]*\s+(?=[\"“(*_\[]*[A-Z\d])", block) if one]


@cache
def read(page: str) -> str:
    return plain((ROOT / page).read_text("utf-8"))


def words(text: str) -> int:
    return len(text.split())


def written_words(page: str) -> int:
    """Words that somebody wrote: sentences and tables, without code, output and generated parts."""
    text = FENCE.sub("", (ROOT / page).read_text("utf-8"))
    text = re.sub(r"<!-- generated: .*?<!-- end -->|<!--.*?-->", "", text, flags=re.DOTALL)
    return len(re.findall(r"[^\s|]*\w[^\s|]*", text))


@pytest.mark.parametrize("pattern", [PRONOUNS, REFUSED], ids=["that of", "is refused"])
def test_no_page_has_the_phrase(pattern: re.Pattern[str]) -> None:
    found = [f"{page}: …{match[0]}…" for page in WRITTEN for match in pattern.finditer(read(page))]
    assert found == []


def test_few_sentences_are_long() -> None:
    """Of all pages together, so that one sentence that needs its length is possible."""
    found = [(page, one) for page in WRITTEN for one in sentences(read(page))]
    long = [f"{page}: {one}" for page, one in found if words(one) > MAX_SENTENCE_WORDS]
    assert len(long) <= MAX_LONG_SENTENCES * len(found), "\n".join([f"{len(long)} of {len(found)}", *long])


def test_semicolons_are_rare() -> None:
    counts = {page: read(page).count(";") for page in WRITTEN}
    total = sum(words(read(page)) for page in WRITTEN)
    most = sorted(counts, key=lambda page: -counts[page])[:10]
    assert sum(counts.values()) <= MAX_SEMICOLONS * total, {page: counts[page] for page in most}


def test_the_documentation_is_short() -> None:
    counts = {page: written_words(page) for page in WRITTEN}
    most = sorted(counts, key=lambda page: -counts[page])[:10]
    assert sum(counts.values()) <= MAX_WORDS, {page: counts[page] for page in most}


@pytest.mark.parametrize("page", [page for page in WRITTEN if page.startswith(SHORT_FOLDERS)])
def test_a_page_answers_one_question(page: str) -> None:
    most, _ = LONGER.get(page, (MAX_PAGE_WORDS, ""))
    assert written_words(page) <= most, "split it, or add it to LONGER with a reason"


def test_exceptions_are_needed() -> None:
    for page, (most, reason) in LONGER.items():
        assert reason
        assert MAX_PAGE_WORDS < written_words(page) <= most


def test_what_is_counted() -> None:
    text = (
        "# Title of it\n\nUse *this*; then `a; b`. See [the page](a;b.md).\n\n| a; b |\n\n- One of\n  two.\n- Three.\n"
        "\n```sh\na; b\n```\n\n<!-- note; -->\n1. Version 1.2 is out. It (really) works.\n"
    )
    found = sentences(plain(text))
    assert found == [
        "Use *this*; then X.",
        "See [the page].",
        "One of two.",
        "Three.",
        "Version 1.2 is out.",
        "It (really) works.",
    ]
    assert plain(text).count(";") == 1
    assert PRONOUNS.search("the rate is that of the last step")
    assert PRONOUNS.search("cells that offer") is None
