"""Files that are text: one document each, or many between WikiExtractor's marks."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

from zero2all.corpus.readers.base import BrokenRecord, Limits, WholeFile
from zero2all.corpus.readers.encoding import as_utf8, decode, decoded
from zero2all.corpus.readers.streams import Stream, lines

_DOC = re.compile(r"<doc\s+([^>]*)>\s*$")
# Where a value begins: after the first name, or after a name that follows a quote. A title may hold quotes itself.
_VALUE = re.compile(r'(?:^(?:[^"]*\s)?|"\s+)([\w-]+)="')


def whole_text(stream: Stream, name: str, limits: Limits) -> Iterator[dict[str, Any]]:
    """The file as one record; cut at line ends only if it is too long for one."""
    head = stream.peek(limits.text_piece + 1)
    if len(head) <= limits.text_piece:
        yield WholeFile(id=name, title=name, content=decode(head))
        return
    for number, piece in enumerate(_pieces(decoded(stream), limits.text_piece)):
        yield WholeFile(id=f"{name}#{number}", title=name, content=piece)


def _pieces(blocks: Iterator[str], size: int) -> Iterator[str]:
    waiting: list[str] = []
    length = 0
    for block in blocks:
        waiting.append(block)
        length += len(block)
        if length <= size:
            continue
        held = "".join(waiting)
        while len(held) > size:
            end = held.rfind("\n", size // 2, size) + 1 or size
            yield held[:end]
            held = held[end:]
        waiting, length = [held], len(held)
    if length:
        yield "".join(waiting)


def wikiextractor(stream: Stream, limits: Limits) -> Iterator[dict[str, Any]]:
    """``<doc id= url= title=>`` to ``</doc>``. Redirects have a title and nothing else: records of no text."""
    record: dict[str, Any] | None = None
    body: list[str] = []
    size = 0
    for number, raw in enumerate(lines(as_utf8(stream), limits.record_bytes), 1):
        line = (raw or b"").decode("utf-8", "replace")
        opened = _DOC.match(line)
        if opened:
            if record is not None:
                yield BrokenRecord("article without an end", f"line {number}", str(record))
            record, body, size = {k: html.unescape(v) for k, v in attributes(opened[1])}, [], 0
        elif line.strip() == "</doc>":
            if record is None or size > limits.record_bytes:
                yield BrokenRecord(
                    "article without a beginning" if record is None else "article too long", f"line {number}"
                )
            else:
                yield {**record, "text": _without_title("".join(body), record.get("title", ""))}
            record, body = None, []
        elif record is not None:
            size += len(line)
            if size <= limits.record_bytes:
                body.append(line)
        elif line.strip():
            yield BrokenRecord("text between articles", f"line {number}", line)
    if record is not None:
        yield BrokenRecord("article without an end", "end of file", str(record))


def attributes(text: str) -> Iterator[tuple[str, str]]:
    """Names and values of ``name="value" name="value"``. A value ends at the last quote before the next name."""
    begun = list(_VALUE.finditer(text))
    ends = [following.start() for following in begun[1:]]
    rest = text.rstrip()
    if begun and rest.endswith('"') and len(rest) > begun[-1].end():
        ends.append(len(rest) - 1)
    for value, end in zip(begun, ends, strict=False):
        yield value[1], text[value.end() : end]


def _without_title(body: str, title: str) -> str:
    first, _, rest = body.partition("\n")
    return rest.strip("\n") if first.strip() == title.strip() else body.strip("\n")
