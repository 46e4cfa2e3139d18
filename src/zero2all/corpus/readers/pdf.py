"""PDF files: the text layer of all pages as one document."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import IO

from zero2all.corpus.readers.base import (
    BrokenRecord,
    ReadLimits,
    TextRecord,
    UnreadableFileError,
    UnreadableItemError,
)
from zero2all.corpus.readers.plain_text import sensible_title, split_text
from zero2all.corpus.readers.reader_child import NEXT
from zero2all.corpus.readers.reader_process import ReaderProcess, require_package

MAX_PAGES = 100_000
MIN_RUNNING_PAGES = 3  # that begin or end with the same line before it counts as a header or footer
_NUMBER = re.compile(r"\d+")
_HYPHEN = re.compile("(?<=[a-zß-öø-ÿ])[-\u2010\u00ad]\n(?=[a-zß-öø-ÿ])")


def read_pdf(file: IO[bytes], name: str, limits: ReadLimits) -> Iterator[TextRecord | BrokenRecord]:
    """One document, and a stand-in for each page that cannot be read."""
    require_package("pypdf")
    pages: list[str] = []
    broken: list[BrokenRecord] = []
    size = 0
    with ReaderProcess("pdf", file, limits) as process:
        title = (process.ask(NEXT) or b"").decode("utf-8", "surrogatepass")
        while len(pages) + len(broken) < MAX_PAGES:
            try:
                page = process.ask(NEXT)
            except UnreadableItemError as reason:
                broken.append(BrokenRecord(str(reason), f"page {len(pages) + len(broken) + 1}"))
                continue
            if page is None:
                break
            size += len(page)
            if size > limits.record_bytes:
                raise UnreadableFileError(f"text larger than {limits.record_bytes >> 20} MiB")
            pages.append(page.decode("utf-8", "surrogatepass"))
        else:
            raise UnreadableFileError(f"more than {MAX_PAGES} pages")
    text = join_pages(pages)
    if not text.strip():
        raise UnreadableFileError("broken pages" if broken else "no text layer")
    yield from broken
    yield from split_text(name, sensible_title(title) or name, text, limits, pages=len(pages) + len(broken))


def join_pages(pages: Sequence[str]) -> str:
    """The pages without running headers, footers and page numbers; words that a line end divides are joined."""
    left: list[str | None] = [page.strip() for page in pages]
    for place in (0, -1, 0, -1):  # twice: a header may be two lines
        left = _remove_running_lines(left, place)
    return _HYPHEN.sub("", "\n".join(page for page in left if page is not None))


def _remove_running_lines(pages: list[str | None], place: int) -> list[str | None]:
    """Without the first or last line of pages where a third of all pages have it, up to the numbers in it. None stands
    for a page of which nothing is left."""
    # Only one line of a page is cut off: all lines of a hostile page, as objects, would be many times its size.
    cuts = [(page or "").partition("\n") if place == 0 else (page or "").rpartition("\n")[::-1] for page in pages]
    keys = [_NUMBER.sub("0", line.strip()) for line, _, _ in cuts]
    least = max(MIN_RUNNING_PAGES, len(pages) / 3)
    running = {key for key, count in Counter(keys).items() if key and count >= least}
    return [
        page if page is None or key not in running else rest if line_end else None
        for page, key, (_, line_end, rest) in zip(pages, keys, cuts, strict=True)
    ]
