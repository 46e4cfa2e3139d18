"""Encoding detection by trial decoding, and fixing of mojibake (UTF-8 once decoded as something else)."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass

from zero2all.corpus.readers.base import UnreadableFileError, import_optional
from zero2all.corpus.readers.streams import PeekableStream

BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # begins like the next one, so it is asked first
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
MAX_DAMAGED_SHARE = 0.005  # of the non-ASCII characters may be damaged before another encoding is tried
# At most this share of the bytes of a Western text are accented letters; Russian or Japanese has far more.
MAX_WESTERN_ACCENTED_SHARE = 0.4
_HIGH = re.compile(rb"[\x80-\xff]")
_PAIR = re.compile(rb"[\x81-\xfe][\x40-\x7e\x80-\xfe]")
_COMMON_HAN = re.compile(rb"[\xb0-\xd7][\xa1-\xfe]|[\xa1-\xa3][\xa1-\xfe]")  # GB 2312's first level and punctuation
_CONTROLS = bytes([*range(9), *range(0x0E, 0x1B), *range(0x1C, 0x20)])


@dataclass(frozen=True)
class TextEncoding:
    name: str
    errors: str = "strict"  # "replace" where a few characters are damaged


def detect_encoding(head: bytes, *, is_complete: bool = False) -> TextEncoding:
    """The encoding of bytes that begin so. ``is_complete``: this is all there is.

    UTF-8 is what it looks like or it is not; GB18030 has to be mostly common Chinese characters, because nearly any
    bytes can be read as rare ones; what is left is Western if only a few of its letters are accented.
    """
    for mark, name in BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            return TextEncoding(name)
    if head.isascii():
        return TextEncoding("ascii")
    if looks_binary(head):
        raise UnreadableFileError("binary, not text")
    for name in ("utf-8", "gb18030"):
        damaged, read = _count_damaged(head, name, is_complete=is_complete)
        if damaged <= MAX_DAMAGED_SHARE * read and (name == "utf-8" or _is_chinese(head)):
            return TextEncoding(name, "replace" if damaged else "strict")
    accented = len(_HIGH.findall(head))
    if accented <= max(2, MAX_WESTERN_ACCENTED_SHARE * len(head)):
        return TextEncoding("latin-1" if re.search(rb"[\x81\x8d\x8f\x90\x9d]", head) else "cp1252")
    raise UnreadableFileError("text in an unknown encoding")


def looks_binary(head: bytes) -> bool:
    """Text has tabs and line ends, and of the other control characters hardly any."""
    if any(head.startswith(mark) for mark in BYTE_ORDER_MARKS):
        return False
    return b"\0" in head or len(head) - len(head.translate(None, _CONTROLS)) > 0.01 * len(head)


def _count_damaged(head: bytes, name: str, *, is_complete: bool) -> tuple[int, int]:
    """Damaged and valid non-ASCII characters if read so."""
    text = codecs.getincrementaldecoder(name)("replace").decode(head, final=is_complete)
    damaged = text.count("\ufffd") - head.count(b"\xef\xbf\xbd") * (name == "utf-8")
    other = len(text) - len(text.encode("ascii", "ignore"))
    return damaged, other - damaged


def _is_chinese(head: bytes) -> bool:
    pairs = _PAIR.findall(head)
    common = len(_COMMON_HAN.findall(head))
    return bool(pairs) and common >= 0.6 * len(pairs)


def decode_text(data: bytes) -> str:
    """A complete text. Where its head misleads, all of it decides."""
    encoding = detect_encoding(data[: 1 << 20], is_complete=len(data) <= 1 << 20)
    try:
        return data.decode(encoding.name, encoding.errors)
    except UnicodeDecodeError:
        encoding = detect_encoding(data, is_complete=True)
        return data.decode(encoding.name, "replace")


def decode_stream(stream: PeekableStream) -> Iterator[str]:
    """A stream as text, block by block, decided by its first block that is not all ASCII."""
    encoding: TextEncoding | None = None
    decoder: codecs.IncrementalDecoder | None = None
    first = True
    for block in stream.blocks():
        if decoder is None and (first or not block.isascii()):
            encoding = detect_encoding(block)
            if encoding.name != "ascii":
                decoder = codecs.getincrementaldecoder(encoding.name)("replace")
        first = False
        yield decoder.decode(block) if decoder else block.decode("ascii")
    if decoder:
        yield decoder.decode(b"", final=True)


class Utf8Reader:
    """A stream in another encoding, as the UTF-8 bytes that parsers want."""

    def __init__(self, stream: PeekableStream) -> None:
        self._texts, self._rest = decode_stream(stream), b""

    def read(self, size: int, /) -> bytes:
        while not self._rest:
            text = next(self._texts, None)
            if text is None:
                return b""
            self._rest = text.encode("utf-8", "replace")
        block, self._rest = self._rest[:size], self._rest[size:]
        return block


def to_utf8(stream: PeekableStream, *, replace_errors: bool = True) -> PeekableStream:
    """The stream itself if it is UTF-8 by its head, without its byte order mark.

    Damaged characters are replaced, or without ``replace_errors`` left for the parser to find.
    """
    encoding = detect_encoding(stream.peek())
    if encoding.name == "utf-8-sig":
        stream.read(3)
    is_utf8 = encoding.name in ("ascii", "utf-8", "utf-8-sig")
    return (
        stream
        if is_utf8 and (encoding.errors == "strict" or not replace_errors)
        else PeekableStream(Utf8Reader(stream))
    )


# Text read in the wrong encoding shows as Western, Greek, Cyrillic or drawing characters side by side. Looking for
# that first spares good text the slow check. It begins with one set of characters, which re can skip to quickly.
_MOJIBAKE_CANDIDATE = re.compile(
    "[\x80-\u052f\u2010-\u25ff\ufb01\ufb02\ufffd](?:"
    "(?<=[\x80-\x9fŒœ])"
    "|(?<=[\xa0-\u052f\u2030-\u25ff\ufb01\ufb02\ufffd])[\x80-\u052f\u2010-\u25ff\ufb01\ufb02\ufffd]"
    "|(?<=[\u2010-\u202f])[\x80-\u052f\u2030-\u25ff])"
)
_CERTAIN_MOJIBAKE = re.compile("Ã[\x80-\xbf]|Â[\xa0-\xbf]|â€|[\x80-\x9f]")  # certain enough to require ftfy


def fix_mojibake(text: str) -> str | None:
    """UTF-8 that was read as another encoding, decoded correctly. Lines that do not look bad are not touched.

    None where it is plainly bad and ftfy is not installed.
    """
    if not _MOJIBAKE_CANDIDATE.search(text):
        return text
    lines = [_fix_line(line) for line in text.split("\n")]
    fixed = [line for line in lines if line is not None]
    return "\n".join(fixed) if len(fixed) == len(lines) else None


def _fix_line(line: str) -> str | None:
    if not _MOJIBAKE_CANDIDATE.search(line):
        return line
    try:
        ftfy = import_optional("ftfy")
    except UnreadableFileError:
        return None if _CERTAIN_MOJIBAKE.search(line) else line
    fixed: str = ftfy.fix_encoding(line) if ftfy.badness.is_bad(line) else line
    return fixed
