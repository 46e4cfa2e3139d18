"""Files that are text: one document each, many between WikiExtractor's marks, or the rows of a table (CSV)."""

from __future__ import annotations

import csv
import html
import re
from collections.abc import Iterator

from zero2all.base.plugins import register
from zero2all.corpus.document import CODE_EXTENSIONS
from zero2all.corpus.readers.base import BrokenRecord, ReadLimits, TextRecord, UnreadableFileError
from zero2all.corpus.readers.encoding import decode_stream, decode_text, to_utf8
from zero2all.corpus.readers.streams import PeekableStream, iter_lines

_DOC = re.compile(r"<doc\s++([^>]*+)>\s*$")
# Where a value begins: after the first name, or after a name that follows a quote. A title may hold quotes itself.
_VALUE = re.compile(r'(?:^(?:[^"]*\s)?|"\s+)([\w-]+)="')

READ_TITLE_CHARACTERS, MAX_TITLE_CHARACTERS = 3000, 300  # looked at, and kept
# What programs write there when the author gave none.
_NOT_A_TITLE = re.compile(
    r"[\W\d_]*|untitled.{0,9}|microsoft (?:word|powerpoint|excel) - .*|"
    r".*\.(?:docx?|odt|rtf|pdf|ps|tex|dvi|indd|qxd|fm|p65|pptx?|xlsx?|html?|txt)",
    re.IGNORECASE,
)


@register("reader", "code", extensions=tuple(CODE_EXTENSIONS), raw=True)
@register("reader", "markdown", extensions=(".md", ".markdown", ".rst"))
@register("reader", "text", extensions=(".txt", ".text", ".tex", ".org", ".adoc"))
def read_text(stream: PeekableStream, name: str, limits: ReadLimits) -> Iterator[TextRecord]:
    """The file as one record; split at line ends only if it is too long for one."""
    head = stream.peek(limits.max_document_characters + 1)
    if len(head) <= limits.max_document_characters:
        yield TextRecord(id=name, title=name, content=decode_text(head))
    else:
        yield from _numbered_parts(decode_stream(stream), limits, name, title=name)


def split_text(name: str, title: str, text: str, limits: ReadLimits, **others: str | int) -> Iterator[TextRecord]:
    """The text of a file in another format, by the same rule."""
    if len(text) <= limits.max_document_characters:
        yield TextRecord(id=name, title=title, content=text, **others)
    else:
        yield from _numbered_parts(iter([text]), limits, name, title=title, **others)


def sensible_title(title: str) -> str:
    """The title in a document's metadata; empty if it is the name of a file or a program's default."""
    title = " ".join(title[:READ_TITLE_CHARACTERS].split())
    return "" if _NOT_A_TITLE.fullmatch(title) else title[:MAX_TITLE_CHARACTERS]


def _numbered_parts(blocks: Iterator[str], limits: ReadLimits, name: str, **fields: str | int) -> Iterator[TextRecord]:
    for number, part in enumerate(_split_at_line_ends(blocks, limits.max_document_characters)):
        yield TextRecord(id=f"{name}#{number}", content=part, **fields)


def _split_at_line_ends(blocks: Iterator[str], size: int) -> Iterator[str]:
    waiting = ""
    for block in blocks:
        waiting += block
        while len(waiting) > size:
            end = waiting.rfind("\n", size // 2, size) + 1 or size
            yield waiting[:end]
            waiting = waiting[end:]
    if waiting:
        yield waiting


@register("reader", "wikiextractor")
def read_wikiextractor(
    stream: PeekableStream, name: str, limits: ReadLimits
) -> Iterator[dict[str, str] | BrokenRecord]:
    """``<doc id= url= title=>`` to ``</doc>``. Redirects have a title and nothing else: records of no text."""
    record: dict[str, str] | None = None
    body: list[str] = []
    size = 0
    for number, raw in enumerate(iter_lines(to_utf8(stream), limits.record_bytes), 1):
        line = (raw or b"").decode("utf-8", "replace")
        opened = _DOC.match(line)
        if opened:
            if record is not None:
                yield BrokenRecord("article without an end", f"line {number}", str(record))
            record, body, size = {k: html.unescape(v) for k, v in parse_attributes(opened[1])}, [], 0
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


def parse_attributes(text: str) -> Iterator[tuple[str, str]]:
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


DELIMITERS = "\t,;|"


@register("reader", "csv", extensions=(".csv", ".tsv"))
def read_csv(stream: PeekableStream, name: str, limits: ReadLimits) -> Iterator[dict[str, str] | BrokenRecord]:
    """Rows under a header. A row of another length is broken, not shifted."""
    csv.field_size_limit(limits.record_bytes)
    lines = _decoded_lines(to_utf8(stream), limits)
    header_line = next(lines, "")
    delimiter = max(DELIMITERS, key=header_line.count)
    if not header_line.count(delimiter):
        raise UnreadableFileError("table without columns")
    try:
        header = [name.strip() for name in next(csv.reader([header_line.lstrip("\ufeff")], delimiter=delimiter))]
    except csv.Error as error:
        raise UnreadableFileError("table without a header") from error
    if any(not name for name in header[1:]) or len(set(header)) < len(header):
        raise UnreadableFileError("table without a header")
    rows = csv.reader(lines, delimiter=delimiter)
    while True:
        place = f"line {rows.line_num + 2}"  # after the header
        try:
            row = next(rows, None)
        except csv.Error:
            yield BrokenRecord("broken row", place)
            continue
        if row is None:
            return
        if len(row) == len(header):
            yield dict(zip(header, row, strict=True))
        elif row:
            yield BrokenRecord("row that does not fit the header", place, delimiter.join(row))


def _decoded_lines(stream: PeekableStream, limits: ReadLimits) -> Iterator[str]:
    """For the csv module, which wants their ends kept."""
    for line in iter_lines(stream, limits.record_bytes):
        yield "\n" if line is None else line.decode("utf-8", "replace").replace("\0", "")
