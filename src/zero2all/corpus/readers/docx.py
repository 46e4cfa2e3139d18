"""Word files (.docx): the text of the body, a line for each paragraph and for each row of a table."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import IO

from zero2all.corpus.readers.archives import ZipPackage
from zero2all.corpus.readers.base import READ_ERRORS, ReadLimits, TextRecord, UnreadableFileError
from zero2all.corpus.readers.plain_text import READ_TITLE_CHARACTERS, sensible_title, split_text
from zero2all.corpus.readers.xml_parts import TextOf, parse_xml

RELATIONS, PROPERTIES, MAIN_PART = "_rels/.rels", "docProps/core.xml", "word/document.xml"


def read_docx(file: IO[bytes], name: str, limits: ReadLimits) -> Iterator[TextRecord]:
    package = ZipPackage(file, limits)
    main = _MainPart()
    if RELATIONS in package:
        parse_xml(package.read(RELATIONS), main)
    body = _Body()
    parse_xml(package.read(main.path), body)
    yield from split_text(name, _title(package) or name, body.written.getvalue(), limits)


def _title(package: ZipPackage) -> str:
    """Not worth losing the text for."""
    title = TextOf("title", READ_TITLE_CHARACTERS)
    try:
        parse_xml(package.read(PROPERTIES), title)
    except (UnreadableFileError, *READ_ERRORS):
        return ""
    return sensible_title(title.found)


class _MainPart:
    """Where the body is; some programs number it."""

    path = MAIN_PART

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "Relationship" and attributes.get("Type", "").endswith("/officeDocument"):
            self.path = attributes.get("Target", self.path).removeprefix("/")

    def end(self, name: str) -> None:
        """Nothing to do."""

    def text(self, text: str) -> None:
        """There is none."""


# Copies for programs that cannot show the original, and text where it was before it was moved.
_SKIPPED = {"Fallback", "moveFrom"}
_MARKS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "\u2011"}


class _Body:
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
