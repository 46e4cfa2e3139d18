"""Web pages: HTML files, and the responses in WARC files."""

from __future__ import annotations

import codecs
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace

from zero2all.base.plugins import register
from zero2all.corpus.readers.base import (
    TOO_DEEP,
    BrokenRecord,
    ReadLimits,
    TextRecord,
    UnreadableFileError,
    UnreadableItemError,
    import_optional,
)
from zero2all.corpus.readers.encoding import detect_encoding
from zero2all.corpus.readers.reader_child import ALL_TEXT, MAIN_TEXT, NEXT
from zero2all.corpus.readers.reader_process import ReaderProcess
from zero2all.corpus.readers.streams import PeekableStream

_CHARSET = re.compile(rb"""<meta[^<>]+charset\s*+=\s*+["']?\s*+([\w-]+)""", re.I)
_SCRIPT = re.compile(r"<script\b([^<>]*)>", re.I)
_TEMPLATE = re.compile(r"""type=["']?text/[\w-]*(?:template|html)""", re.I)
_SCRIPT_END = re.compile(r"</script>", re.I)
_HEADER_END = re.compile(rb"\r?\n\r?\n")
_EMPTY_ELEMENT = re.compile(r"<([A-Za-z][\w:-]*+)([^<>]*)/>")
# HTML elements that have no end tag.
VOID_ELEMENTS = {
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr",
}  # fmt: skip
# Elements that a parser opens again in every paragraph until they are closed. Links are not among them: a link ends the
# one before.
_FORMATTING = re.compile(r"(</?)(?:b|big|code|em|font|i|s|small|strike|strong|tt|u)(?=[\s/>])", re.I | re.A)
MAX_COPIES = 1_000_000  # of such elements, of 340 bytes each
# Elements that may stay open without nesting: the next of their kind ends them.
_OPEN_ENDED = {
    "p", "li", "dt", "dd", "tr", "td", "th", "thead", "tbody", "tfoot", "colgroup", "option", "optgroup", "a",
}  # fmt: skip
_TAG = re.compile(r"<(/?)([a-z][a-z0-9]*+)", re.I | re.A)
MAX_DEPTH = 5000  # of elements; browsers flatten what is deeper than 512
MAX_SCANNED_TAGS = 1_000_000
MAX_TAGS = 30_000  # of a page that is parsed in this process: at every one, all open elements may be looked at
PAGE_SECONDS = 20  # of CPU time, for a page with more
# Codecs of Python that no page is in. Decoding punycode takes quadratic time.
NOT_FOR_PAGES = {"punycode", "idna", "unicode-escape", "raw-unicode-escape"}
HEADER_BYTES = 1 << 16
PIECE_CHARACTERS = 1 << 20


@register("reader", "html", extensions=(".html", ".htm", ".xhtml"))
def read_html(stream: PeekableStream, name: str, limits: ReadLimits) -> Iterator[TextRecord]:
    """The text of a page, without navigation, as one record."""
    data = stream.read_all(limits.record_bytes, "page")
    yield TextRecord(id=name, **_extract_page(decode_html(data), limits, title=name), raw_bytes=len(data))


def _extract_page(html: str, limits: ReadLimits, title: str = "") -> dict[str, str]:
    """Title and main text of a page."""
    found, text = _parse_html(html, MAIN_TEXT, limits)
    if not text.strip():  # a page that is all navigation by its looks, or filled in by a script from a template
        found, text = _parse_html(inline_templates(html), ALL_TEXT, limits)
    return {"title": found.strip() or title, "content": text.strip()}


def _parse_html(html: str, text: bytes, limits: ReadLimits) -> tuple[str, str]:
    """Title and text. A page with many tags is parsed in another process: nesting makes time and memory quadratic."""
    tree_of = import_optional("resiliparse.parse.html").HTMLTree.parse
    plain_text = import_optional("resiliparse.extract.html2text").extract_plain_text
    tags = html.count("<")
    if MAX_DEPTH < tags < MAX_SCANNED_TAGS and _is_too_deep(html):
        raise UnreadableItemError(TOO_DEEP)
    if tags > MAX_TAGS:
        try:
            with ReaderProcess("html", io.BytesIO(), replace(limits, reader_seconds=PAGE_SECONDS)) as process:
                process.ask(NEXT)
                return process.parse_html(html, text)
        except UnreadableFileError as reason:
            raise UnreadableItemError(str(reason)) from reason
    if tags**2 > MAX_COPIES:
        plain, count = _FORMATTING.subn(r"\1span", html)
        html = plain if tags * count > MAX_COPIES else html
    tree = tree_of(html)
    return tree.title or "", plain_text(tree, main_content=text == MAIN_TEXT, alt_texts=False)


def _is_too_deep(html: str) -> bool:
    """Whether elements are nested so deep that a parser, which looks at all open ones, takes minutes."""
    depth = 0
    for tag in _TAG.finditer(html):
        name = tag[2].lower()
        if name not in _OPEN_ENDED and name not in VOID_ELEMENTS:
            depth = max(0, depth - 1) if tag[1] else depth + 1
            if depth > MAX_DEPTH:
                return True
    return False


def inline_templates(html: str) -> str:
    """The page with every script that is a template of HTML replaced by what it holds, in one pass."""
    parts, at = [], 0
    for opened in _SCRIPT.finditer(html):
        if opened.start() < at or not _TEMPLATE.search(opened[1]):
            continue
        closed = _SCRIPT_END.search(html, opened.end())
        if closed is None:
            break
        parts += [html[at : opened.start()], html[opened.end() : closed.start()]]
        at = closed.end()
    return "".join([*parts, html[at:]])


def html_to_text(html: str) -> str:
    """The text of a page or of a fragment."""
    return _parse_html(html, ALL_TEXT, ReadLimits())[1].strip()


def close_empty_elements(xhtml: str) -> str:
    """XHTML as HTML. A parser of HTML would take an empty ``<title/>`` as open and lose the rest."""
    closed, start = io.StringIO(), 0
    while start < len(xhtml):  # in pieces, because a pattern keeps an object for each place until it has them all
        end = xhtml.find(">", start + PIECE_CHARACTERS) + 1 or len(xhtml)
        closed.write(_EMPTY_ELEMENT.sub(_with_end_tag, xhtml[start:end]))
        start = end
    return closed.getvalue()


def _with_end_tag(empty: re.Match[str]) -> str:
    return empty[0] if empty[1].lower() in VOID_ELEMENTS else f"<{empty[1]}{empty[2]}></{empty[1]}>"


def decode_html(data: bytes, charset: str = "") -> str:
    """The encoding that the page declares is tried first, and often wrong."""
    declared = _CHARSET.search(data[:4096])
    for name in (charset, declared[1].decode() if declared else ""):
        name = "gb18030" if name.lower() in ("gb2312", "gbk") else name or "utf-8"
        try:
            if codecs.lookup(name).name not in NOT_FOR_PAGES:
                return data.decode(name)
        except (LookupError, ValueError):  # no such encoding, or not in it
            continue
    try:
        encoding = detect_encoding(data, is_complete=True)
    except UnreadableFileError as reason:
        raise UnreadableItemError(str(reason)) from reason
    return data.decode(encoding.name, "replace")


@register("reader", "warc", extensions=(".warc",), magic=b"WARC/")
def read_warc(stream: PeekableStream, name: str, limits: ReadLimits) -> Iterator[TextRecord | BrokenRecord]:
    """A record for every response that is HTML. Other records are skipped; a broken one ends the file."""
    while True:
        header = _warc_header(stream)
        if header is None:
            return
        size = int(header.get("content-length", "-1")) if header.get("content-length", "").isdigit() else -1
        if size < 0:
            yield BrokenRecord("broken WARC record", header.get("warc-record-id", ""))
            return
        wanted = header.get("warc-type") == "response" and "http" in header.get("content-type", "")
        body = _read_exactly(stream, size, keep=wanted and size <= limits.record_bytes)
        if body is None:
            yield BrokenRecord("WARC record cut short", header.get("warc-record-id", ""))
            return
        if wanted and size > limits.record_bytes:
            yield BrokenRecord(f"page larger than {limits.record_bytes >> 20} MiB", header.get("warc-record-id", ""))
        elif wanted:
            yield from _read_response(header, body, limits)


def _warc_header(stream: PeekableStream) -> dict[str, str] | None:
    while stream.peek(2)[:2] in (b"\r\n", b"\n\n") or stream.peek(1) == b"\n":
        stream.read(2 if stream.peek(2) == b"\r\n" else 1)
    head = stream.peek(HEADER_BYTES)
    if not head:
        return None
    end = _HEADER_END.search(head)
    if not head.startswith(b"WARC/") or end is None:
        raise UnreadableFileError("broken WARC")
    _read_exactly(stream, end.end(), keep=False)
    return _parse_headers(head[: end.start()])


def _parse_headers(header: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in header.decode("utf-8", "replace").splitlines()[1:])
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _read_exactly(stream: PeekableStream, size: int, *, keep: bool) -> bytes | None:
    """The next ``size`` bytes, empty if not kept, None if missing."""
    parts = []
    while size > 0:
        block = stream.read(min(size, 1 << 20))
        if not block:
            return None
        size -= len(block)
        if keep:
            parts.append(block)
    return b"".join(parts)


def _read_response(header: dict[str, str], body: bytes, limits: ReadLimits) -> Iterator[TextRecord | BrokenRecord]:
    record_id = header.get("warc-record-id", "").strip("<>")
    end = _HEADER_END.search(body)
    if end is None:
        yield BrokenRecord("broken HTTP response", record_id)
        return
    http = _parse_headers(body[: end.start()])
    kind, _, parameters = http.get("content-type", "").partition(";")
    if kind.strip().lower() not in ("text/html", "application/xhtml+xml"):
        return
    try:
        data = _decode_body(body[end.end() :], http, limits.record_bytes)
    except (ValueError, zlib.error):
        yield BrokenRecord("broken HTTP response", record_id)
        return
    charset = parameters.partition("charset=")[2].strip(" \"'")
    kept = {"url": header.get("warc-target-uri", "").strip("<>"), "time": header.get("warc-date", "")}
    try:
        page = _extract_page(decode_html(data, charset), limits)
    except UnreadableItemError as reason:  # one such page is no reason to skip all that follow
        yield BrokenRecord(str(reason), record_id)
        return
    yield TextRecord(id=record_id, **page, raw_bytes=len(data), **kept)  # raw_bytes: how much was discarded


def _decode_body(body: bytes, http: dict[str, str], limit: int) -> bytes:
    """Without transfer and content encoding. Some crawlers undo these and keep the header that names them."""
    if "chunked" in http.get("transfer-encoding", "") and re.match(rb"[0-9A-Fa-f]+\s*(;[^\r\n]*)?\r?\n", body):
        body = _decode_chunked(body)
    if http.get("content-encoding") in ("gzip", "x-gzip") and body.startswith(b"\x1f\x8b"):
        unpacker = zlib.decompressobj(wbits=31)
        body = unpacker.decompress(body, limit)
        if unpacker.unconsumed_tail:
            raise ValueError("too large")
    return body


def _decode_chunked(body: bytes) -> bytes:
    parts, at = [], 0
    while (line_end := body.find(b"\n", at)) >= 0:
        size = int(body[at:line_end].partition(b";")[0], 16)
        if size < 0:
            raise ValueError("broken chunk")
        if size == 0:
            break
        parts.append(body[line_end + 1 : line_end + 1 + size])
        at = body.find(b"\n", line_end + 1 + size) + 1 or len(body)
    return b"".join(parts)
