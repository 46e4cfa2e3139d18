"""A reader and a filter."""

from __future__ import annotations

from collections.abc import Iterator

from zero2all.base.plugins import register
from zero2all.corpus.document import Document
from zero2all.corpus.filters import KEEP, Drop, FilterResult
from zero2all.corpus.readers.base import BrokenRecord, ReadLimits
from zero2all.corpus.readers.streams import PeekableStream, iter_lines


@register("reader", "question-lines", extensions=(".qa",))
def question_lines(
    stream: PeekableStream, name: str, limits: ReadLimits, *, separator: str = "?"
) -> Iterator[dict[str, str] | BrokenRecord]:
    """Read a question and its answer from each line, with a separator between them."""
    for number, line in enumerate(iter_lines(stream, limits.record_bytes), start=1):
        question, found, answer = (line or b"").decode("utf-8", "replace").strip().partition(separator)
        if not found:
            yield BrokenRecord("no question", f"line {number}", question)
        else:
            yield {"title": f"{name}:{number}", "text": f"{question}{separator}\n{answer.strip()}"}


@register("filter", "shouting")
def shouting(document: Document, *, max_share: float = 0.5) -> FilterResult:
    """Drop a document whose letters are mostly capitals: headlines, spam, menus."""
    letters = [character for character in document.content if character.isalpha()]
    capitals = sum(character.isupper() for character in letters)
    return Drop("mostly capitals") if letters and capitals > max_share * len(letters) else KEEP
