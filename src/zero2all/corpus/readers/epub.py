"""EPUB books: the chapters in reading order as one document."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from typing import IO
from urllib.parse import unquote

from zero2all.corpus.readers.archives import ZipPackage
from zero2all.corpus.readers.base import (
    READ_ERRORS,
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
from zero2all.corpus.readers.xml_parts import TextOf, parse_xml

CONTAINER, ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
CHAPTER_TYPES = {"application/xhtml+xml", "text/html"}
MAX_CHAPTERS, MAX_CHAPTER_BYTES = 50_000, 16 << 20


def read_epub(file: IO[bytes], name: str, limits: ReadLimits) -> Iterator[TextRecord | BrokenRecord]:
    """One document, and a stand-in for each chapter that cannot be read."""
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


class _Attributes:
    """The values of an attribute of the elements of a name."""

    def __init__(self, element: str, attribute: str) -> None:
        self.element, self.attribute = element, attribute
        self.values: list[str] = []

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == self.element and self.attribute in attributes:
            self.values.append(attributes[self.attribute])

    def end(self, name: str) -> None:
        """Nothing to do."""

    def text(self, text: str) -> None:
        """Of no interest."""


class _Book:
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

    def end(self, name: str) -> None:
        """Nothing to do."""

    def text(self, text: str) -> None:
        """Of no interest."""

    def chapters(self) -> list[str]:
        return list(dict.fromkeys(self._links[one] for one in self._order if one in self._links))
