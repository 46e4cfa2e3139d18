from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from zero2all.corpus import build_corpus
from zero2all.corpus.corpus_report import corpus_report, flows, report_html
from zero2all.recipe import CorpusRecipe, SourceRecipe

EVIL = '<script>alert("x")</script><img src=x onerror=alert(1)> some text that goes on for a while, as texts do. '
QUESTION = "Natalia sold clips to forty eight of her friends in April and then she sold half as many clips in May"


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    prose = "The road went on and on through the hills, and nobody knew where it came from. " * 5
    rows = [{"text": f"{number} {prose} {number * 7}", "url": "https://example.org/a"} for number in range(30)]
    rows = [
        {"text": EVIL * 5, "title": "<b>bold</b>"},
        *rows,
        {"text": f"{prose} {QUESTION}"},
        rows[0],
        {"text": "short"},
    ]
    (root / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (root / "eval.jsonl").write_text(json.dumps({"question": QUESTION, "answer": "72"}))
    recipe = CorpusRecipe(
        sources=[SourceRecipe(name="web", paths=[str(root / "a.jsonl")])],
        filters=["normalize", {"name": "too_short", "min_chars": 20}],
        decontaminate=[str(root / "eval.jsonl")],
        holdout=0,
    )
    build_corpus(recipe, root / "documents")
    return root / "documents"


def test_every_byte_that_was_read_goes_somewhere(documents: Path) -> None:
    report = corpus_report(documents)
    account = report.sources["web"]
    assert account.read.documents == 34
    reasons = {reason: part.documents for reason, part in account.dropped.items()}
    assert reasons == {"too_short: too short": 1, "exact copy": 1, "evaluation text: eval.jsonl": 1}
    assert report.documents == 31
    assert sum(size for _, _, size in flows(report)) == account.read.bytes
    assert report.statistics["web"].domains == {"example.org": report.splits["train"]["web"].documents - 1}


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "src"]


def test_the_page_shows_documents_as_text_and_loads_nothing(documents: Path) -> None:
    page = report_html(corpus_report(documents))
    seen = Tags()
    seen.feed(page)
    assert "&lt;script&gt;" in page
    assert "&lt;b&gt;bold" in page
    assert not seen.tags & {"script", "img", "iframe", "link"}
    assert seen.handlers == []
    assert "exact copy" in page


def test_an_evaluation_set_that_changes_is_looked_at_again(documents: Path) -> None:
    """The same recipe over another evaluation set must not reuse the documents."""
    root = documents.parent
    recipe = CorpusRecipe(
        sources=[SourceRecipe(name="web", paths=[str(root / "a.jsonl")])],
        filters=[],
        decontaminate=[str(root / "other.jsonl")],
    )
    (root / "other.jsonl").write_text(json.dumps({"question": "nothing that anybody wrote " * 5}))
    assert "evaluation text" not in str(build_corpus(recipe, root / "again").sources)
    (root / "other.jsonl").write_text(json.dumps({"question": QUESTION}))
    assert "evaluation text: other.jsonl" in str(build_corpus(recipe, root / "again").sources)
