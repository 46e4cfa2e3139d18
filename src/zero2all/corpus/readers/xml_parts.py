"""XML inside DOCX and EPUB files: expat, with bounds on time and memory whatever the XML is."""

from __future__ import annotations

from typing import Protocol
from xml.parsers import expat

from zero2all.corpus.readers.base import MAX_NESTING, TOO_DEEP, UnreadableFileError

CHUNK_BYTES = 1 << 20
MAX_TAG_BYTES = 4 << 20  # Word writes pictures into attributes
MAX_NAMES = 10_000  # of elements and attributes; the parser keeps all


class XmlHandler(Protocol):
    """Is told the elements in their order, by their names without the prefix."""

    def start(self, name: str, attributes: dict[str, str]) -> None: ...

    def end(self, name: str) -> None: ...

    def text(self, text: str) -> None: ...


def parse_xml(data: bytes, handler: XmlHandler) -> None:
    """Parse a part. Nothing is loaded from elsewhere.

    Declarations inside of the part are refused: entities may expand without end, and attributes with a default value
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


class TextOf:
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
