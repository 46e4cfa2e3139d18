"""Files that are one document each: PDF, Word (.docx) and EPUB.

The XML of the latter two is parsed by expat, with bounds on time and memory whatever it is.
"""

from __future__ import annotations

import io
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import IO
from urllib.parse import unquote
from xml.parsers import expat

from zero2all.base.plugins import register
from zero2all.corpus.readers.archives import ZipPackage
from zero2all.corpus.readers.base import (
    MAX_NESTING,
    READ_ERRORS,
    TOO_DEEP,
    BrokenRecord,
    ReadLimits,
    TextRecord,
    UnreadableFileError,
    UnreadableItemError,
)
from zero2all.corpus.readers.plain_text import READ_TITLE_CHARACTERS, sensible_title, split_text
from zero2all.corpus.readers.reader_child import ALL_TEXT, NEXT
from zero2all.corpus.readers.reader_process import ReaderProcess, require_package
from zero2all.corpus.readers.web_pages import close_empty_elements, decode_html

CHUNK_BYTES = 1 << 20
MAX_TAG_BYTES = 4 << 20  # Word writes pictures into attributes
MAX_NAMES = 10_000  # of elements and attributes; the parser keeps all

# Of Word files.
RELATIONS, PROPERTIES, MAIN_PART = "_rels/.rels", "docProps/core.xml", "word/document.xml"
# Copies for programs that cannot show the original, and text where it was before it was moved.
_SKIPPED = {"Fallback", "moveFrom"}
_MARKS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "\u2011"}

# Of EPUB books.
CONTAINER, ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
CHAPTER_TYPES = {"application/xhtml+xml", "text/html"}
MAX_CHAPTERS, MAX_CHAPTER_BYTES = 50_000, 16 << 20


class XmlHandler:
    """Is told the elements in their order, by their names without the prefix."""

    def start(self, name: str, attributes: dict[str, str]) -> None:
        """An element begins."""

    def end(self, name: str) -> None:
        """An element ends."""

    def text(self, text: str) -> None:
        """Some text inside of the element that was begun last."""


def parse_xml(data: bytes, handler: XmlHandler) -> None:
    """Parse a part. Nothing is loaded from elsewhere.

    A declaration inside of the part is an error: entities may expand without end, and attributes with a default value
    cost time at every element. Namespaces are not resolved: their names, of any length, would come with every element.
    """
    depth = 0

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > MAX_NESTING:
            raise UnreadableFileError(TOO_DEEP)
        handler.start(name.rpartition(":")[2], attributes)

    def end(name: str) -> None:
        nonlocal depth
        depth -= 1
        handler.end(name.rpartition(":")[2])

    def doctype(name: str, system: str | None, public: str | None, has_declarations: int) -> None:
        if has_declarations:
            raise UnreadableFileError("XML with declarations in it")

    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, handler.text
    parser.StartDoctypeDeclHandler = doctype
    try:
        for fed in range(0, len(data), CHUNK_BYTES):
            parser.Parse(data[fed : fed + CHUNK_BYTES], False)
            # A tag is parsed again with every chunk until it is complete, and its attributes take memory.
            if fed + CHUNK_BYTES - parser.CurrentByteIndex > MAX_TAG_BYTES or len(parser.intern) > MAX_NAMES:
                raise UnreadableFileError("XML with too large or too many tags")
        parser.Parse(b"", True)
    except expat.ExpatError as error:
        raise UnreadableFileError("broken XML") from error


class TextOf(XmlHandler):
    """The beginning of the text of the first element of a name."""

    def __init__(self, name: str, characters: int) -> None:
        self.name, self.characters, self.found, self._inside, self._done = name, characters, "", False, False

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._inside = name == self.name and not self._done

    def end(self, name: str) -> None:
        self._done |= self._inside
        self._inside = False

    def text(self, text: str) -> None:
        if self._inside and len(self.found) < self.characters:
            self.found += text


@register("reader", "docx", extensions=(".docx",), seekable=True)
def read_docx(file: IO[bytes], name: str, limits: ReadLimits) -> Iterator[TextRecord]:
    """The text of the body, a line for each paragraph and for each row of a table."""
    package = ZipPackage(file, limits)
    main = _Attributes("Relationship", "Target", ("Type", "/officeDocument"))  # some programs number the body
    if RELATIONS in package:
        parse_xml(package.read(RELATIONS), main)
    body = _Body()
    parse_xml(package.read(main.values[-1].removeprefix("/") if main.values else MAIN_PART), body)
    yield from split_text(name, _title(package) or name, body.written.getvalue(), limits)


def _title(package: ZipPackage) -> str:
    """Not worth losing the text for."""
    title = TextOf("title", READ_TITLE_CHARACTERS)
    try:
        parse_xml(package.read(PROPERTIES), title)
    except (UnreadableFileError, *READ_ERRORS):
        return ""
    return sensible_title(title.found)


class _Body(XmlHandler):
    """Collects text. Deleted text and field codes have elements of their own, which are none of these."""

    def __init__(self) -> None:
        self.written = io.StringIO()  # a list of pieces would be many times their size
        self._skipped = 0  # open elements in what is skipped
        self._runs = self._cells = 0  # open ones; a tab outside of a run is a tab stop
        self._in_text = False

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if self._skipped or name in _SKIPPED:
            self._skipped += 1
        elif name == "r":
            self._runs += 1
        elif name == "tc":
            self._cells += 1
        elif name == "t":
            self._in_text = True
        elif self._runs and name in _MARKS:
            self.written.write(_MARKS[name])

    def end(self, name: str) -> None:
        if self._skipped:
            self._skipped -= 1
        elif name == "r":
            self._runs -= 1
        elif name == "t":
            self._in_text = False
        elif name == "p":
            self.written.write(" " if self._cells else "\n")
        elif name == "tc":
            self._cells -= 1
            self.written.write("\t")
        elif name == "tr":
            self.written.write("\n")

    def text(self, text: str) -> None:
        if self._in_text and not self._skipped:
            self.written.write(text)


@register("reader", "epub", extensions=(".epub",), seekable=True)
def read_epub(file: IO[bytes], name: str, limits: ReadLimits) -> Iterator[TextRecord | BrokenRecord]:
    """The chapters in reading order as one document, and a stand-in for each that cannot be read."""
    require_package("resiliparse")
    package = ZipPackage(file, limits)
    container = _Attributes("rootfile", "full-path")
    parse_xml(package.read(CONTAINER), container)
    root = next(iter(container.values), "")
    about = package.read(root)
    book, title = _Book(), TextOf("title", READ_TITLE_CHARACTERS)
    parse_xml(about, book)
    parse_xml(about, title)
    chapters = [posixpath.normpath(posixpath.join(posixpath.dirname(root), unquote(link))) for link in book.chapters()]
    _refuse_encrypted(package, chapters)
    texts: list[str] = []
    size = 0
    with ReaderProcess("html", file, limits) as process:  # one for the book: its time is limited as a whole
        process.ask(NEXT)
        for chapter in chapters:
            try:
                text = process.parse_html(_read_chapter(package, chapter), ALL_TEXT)[1].strip()
            except UnreadableItemError as reason:
                yield BrokenRecord(str(reason), chapter)
                continue
            texts.append(text)
            size += len(text)
            if size > limits.record_bytes:
                raise UnreadableFileError(f"text larger than {limits.record_bytes >> 20} MiB")
    content = "\n\n".join(filter(None, texts))
    if not content:
        raise UnreadableFileError("no readable chapter")
    yield from split_text(name, sensible_title(title.found) or name, content, limits)


def _read_chapter(package: ZipPackage, path: str) -> str:
    try:
        data = package.read(path)
        if len(data) <= MAX_CHAPTER_BYTES:
            return close_empty_elements(decode_html(data))
    except (UnreadableFileError, *READ_ERRORS) as error:
        raise UnreadableItemError("broken chapter") from error
    raise UnreadableItemError(f"chapter larger than {MAX_CHAPTER_BYTES >> 20} MiB")


def _refuse_encrypted(package: ZipPackage, chapters: list[str]) -> None:
    encrypted = _Attributes("CipherReference", "URI")
    if ENCRYPTION in package:
        parse_xml(package.read(ENCRYPTION), encrypted)
    if not {unquote(path) for path in encrypted.values}.isdisjoint(chapters):  # obfuscated fonts do not matter
        raise UnreadableFileError("encrypted")


class _Attributes(XmlHandler):
    """The values of an attribute of the elements of a name, of which another attribute may have to end in some way."""

    def __init__(self, element: str, attribute: str, ending: tuple[str, str] = ("", "")) -> None:
        self.element, self.attribute, self.ending = element, attribute, ending
        self.values: list[str] = []

    def start(self, name: str, attributes: dict[str, str]) -> None:
        other, end = self.ending
        if name == self.element and self.attribute in attributes and attributes.get(other, "").endswith(end):
            self.values.append(attributes[self.attribute])


class _Book(XmlHandler):
    """The package document: what there is, and the order to read it in."""

    def __init__(self) -> None:
        self._links: dict[str, str] = {}
        self._order: dict[str, None] = {}  # each once, however often the book names it

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "itemref":
            self._order[attributes.get("idref", "")] = None
        elif name == "item" and attributes.get("media-type") in CHAPTER_TYPES:
            if "nav" in attributes.get("properties", "").split():  # the table of contents
                return
            self._links[attributes.get("id", "")] = attributes.get("href", "")
        if max(len(self._order), len(self._links)) > MAX_CHAPTERS:
            raise UnreadableFileError(f"more than {MAX_CHAPTERS} chapters")

    def chapters(self) -> list[str]:
        return list(dict.fromkeys(self._links[one] for one in self._order if one in self._links))


MAX_PAGES = 100_000
MIN_RUNNING_PAGES = 3  # that begin or end with the same line before it counts as a header or footer
_NUMBER = re.compile(r"\d+")
_HYPHEN = re.compile("(?<=[a-zß-öø-ÿ])[-\u2010\u00ad]\n(?=[a-zß-öø-ÿ])")


@register("reader", "pdf", extensions=(".pdf",), magic=b"%PDF-", seekable=True)
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
