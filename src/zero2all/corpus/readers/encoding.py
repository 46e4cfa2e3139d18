"""Which encoding bytes are in, found out by trying, and UTF-8 that was once read as something else put right."""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from zero2all.corpus.readers.base import Unreadable, optional
from zero2all.corpus.readers.streams import Stream

MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # begins like the next one, so it is asked first
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
FEW = 0.005  # of the non-ASCII characters may be damaged before another encoding is thought of
WESTERN_AT_MOST = 0.4  # of the bytes are accented letters in any Western text; Russian or Japanese has far more
_HIGH = re.compile(rb"[\x80-\xff]")
_PAIR = re.compile(rb"[\x81-\xfe][\x40-\x7e\x80-\xfe]")
_COMMON_HAN = re.compile(rb"[\xb0-\xd7][\xa1-\xfe]|[\xa1-\xa3][\xa1-\xfe]")  # GB 2312's first level and punctuation
_CONTROLS = bytes([*range(9), *range(0x0E, 0x1B), *range(0x1C, 0x20)])


@dataclass(frozen=True)
class Encoding:
    name: str
    errors: str = "strict"  # "replace" where a few characters are damaged


def guess(head: bytes, ends: bool = False) -> Encoding:
    """The encoding of bytes that begin so. ``ends`` says that this is all there is.

    UTF-8 is what it looks like or it is not; GB18030 has to be mostly common Chinese characters, because nearly any
    bytes can be read as rare ones; what is left is Western if only a few of its letters are accented.
    """
    for mark, name in MARKS.items():
        if head.startswith(mark):
            return Encoding(name)
    if head.isascii():
        return Encoding("ascii")
    if looks_binary(head):
        raise Unreadable("binary, not text")
    if _is_utf8(head, ends):
        return Encoding("utf-8")
    for name in ("utf-8", "gb18030"):
        damaged, read = _try(head, name, ends)
        if damaged <= FEW * read and (name == "utf-8" or _is_chinese(head)):
            return Encoding(name, "replace" if damaged else "strict")
    accented = len(_HIGH.findall(head))
    if accented <= max(2, WESTERN_AT_MOST * len(head)):
        return Encoding("latin-1" if re.search(rb"[\x81\x8d\x8f\x90\x9d]", head) else "cp1252")
    raise Unreadable("text in an unknown encoding")


def looks_binary(head: bytes) -> bool:
    """Text has tabs and line ends, and of the other control characters hardly any."""
    if any(head.startswith(mark) for mark in MARKS):
        return False
    return b"\0" in head or len(head) - len(head.translate(None, _CONTROLS)) > 0.01 * len(head)


def _is_utf8(head: bytes, ends: bool) -> bool:
    """Most text is, without a flaw, and this is the quickest question."""
    try:
        codecs.utf_8_decode(head, "strict", ends)
    except UnicodeDecodeError:
        return False
    return True


def _try(head: bytes, name: str, ends: bool) -> tuple[int, int]:
    """Damaged and sound non-ASCII characters if read so."""
    text = codecs.getincrementaldecoder(name)("replace").decode(head, final=ends)
    damaged = text.count("\ufffd") - head.count(b"\xef\xbf\xbd") * (name == "utf-8")
    other = len(text) - len(text.encode("ascii", "ignore"))
    return damaged, other - damaged


def _is_chinese(head: bytes) -> bool:
    pairs = _PAIR.findall(head)
    common = len(_COMMON_HAN.findall(head))
    return bool(pairs) and common >= 0.6 * len(pairs)


def decode(data: bytes) -> str:
    """A whole text. Where its first part misleads, all of it decides."""
    encoding = guess(data[: 1 << 20], ends=len(data) <= 1 << 20)
    try:
        return data.decode(encoding.name, encoding.errors)
    except UnicodeDecodeError:
        encoding = guess(data, ends=True)
        return data.decode(encoding.name, "replace")


def decoded(stream: Stream) -> Iterator[str]:
    """A stream as text, block by block, decided by its first block that is not all ASCII."""
    encoding: Encoding | None = None
    decoder: codecs.IncrementalDecoder | None = None
    first = True
    for block in stream.blocks():
        if decoder is None and (first or not block.isascii()):
            encoding = guess(block)
            if encoding.name != "ascii":
                decoder = codecs.getincrementaldecoder(encoding.name)("replace")
        first = False
        yield decoder.decode(block) if decoder else block.decode("ascii")
    if decoder:
        yield decoder.decode(b"", final=True)


class AsUtf8:
    """A stream in another encoding, as the UTF-8 bytes that parsers want."""

    def __init__(self, stream: Stream) -> None:
        self._texts, self._rest = decoded(stream), b""

    def read(self, size: int, /) -> bytes:
        while not self._rest:
            text = next(self._texts, None)
            if text is None:
                return b""
            self._rest = text.encode("utf-8", "replace")
        block, self._rest = self._rest[:size], self._rest[size:]
        return block


def as_utf8(stream: Stream, mend: bool = True) -> Stream:
    """The stream itself if it is UTF-8 by its head, without its byte order mark.

    Damaged characters are replaced, or with ``mend`` false left as they are, to be found by who parses it.
    """
    encoding = guess(stream.peek())
    if encoding.name == "utf-8-sig":
        stream.read(3)
    is_utf8 = encoding.name in ("ascii", "utf-8", "utf-8-sig")
    return stream if is_utf8 and (encoding.errors == "strict" or not mend) else Stream(AsUtf8(stream))


# Text read in the wrong encoding shows as Western, Greek, Cyrillic or drawing characters side by side. Looking for
# that first spares good text the slow question. It begins with one set of characters, which re can skip to quickly.
_SIDE_BY_SIDE = re.compile(
    "[\x80-\u052f\u2010-\u25ff\ufb01\ufb02\ufffd](?:"
    "(?<=[\x80-\x9fŒœ])"
    "|(?<=[\xa0-\u052f\u2030-\u25ff\ufb01\ufb02\ufffd])[\x80-\u052f\u2010-\u25ff\ufb01\ufb02\ufffd]"
    "|(?<=[\u2010-\u202f])[\x80-\u052f\u2030-\u25ff])"
)
_PLAINLY_BAD = re.compile("Ã[\x80-\xbf]|Â[\xa0-\xbf]|â€|[\x80-\x9f]")  # enough to miss ftfy for


def mend_mojibake(texts: Sequence[str]) -> dict[int, str | None]:
    """UTF-8 that was read as another encoding, read rightly: the texts that change, by number.

    None stands for one that is plainly bad where ftfy is not installed. Lines that do not look bad are not touched.
    """
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    joined = b"\n".join(encoded)
    ends = list(accumulate(len(text) + 1 for text in encoded))
    changes: dict[int, list[tuple[int, int, str | None]]] = {}
    line_end = -1
    for place in _odd_places(joined).tolist():
        if place < line_end:
            continue
        line_start, line_end = joined.rfind(b"\n", 0, place) + 1, joined.find(b"\n", place)
        line_end = line_end if line_end >= 0 else len(joined)
        line = joined[line_start:line_end].decode("utf-8", "surrogatepass")
        better = _mended_line(line)
        if better != line:
            number = bisect_right(ends, line_start)
            begin = ends[number - 1] if number else 0
            changes.setdefault(number, []).append((line_start - begin, line_end - begin, better))
    return {number: _with_lines(encoded[number], lines) for number, lines in changes.items()}


def _odd_places(text: bytes) -> NDArray[np.intp]:
    """Where in UTF-8 ``_SIDE_BY_SIDE`` may match, found many times as fast.

    That is two odd characters side by side that are not both punctuation, or one that is odd enough alone.
    """
    data = np.frombuffer(text, dtype=np.uint8)
    # A wide net first: odd characters begin with one of these bytes, most of other texts with none of them.
    places = np.flatnonzero((data - np.uint8(0xC2) <= 0xE2 - 0xC2) | (data == 0xEF))
    places = places[_odd_beginnings()[data[places], data[places + 1]]]
    first, second = data[places], data[places + 1] & np.uint16(0x3F)
    width = np.where(first < 0xE0, 2, 3)
    third = data[places + width - 1] & np.uint16(0x3F)
    points = np.where(
        width == 2, (first & np.uint16(0x1F)) << 6 | second, (first & np.uint16(0x0F)) << 12 | second << 6 | third
    )
    is_odd = (points < 0x530) | ((points >= 0x2010) & (points < 0x2600)) | np.isin(points, (0xFB01, 0xFB02, 0xFFFD))
    places, points, width = places[is_odd], points[is_odd], width[is_odd]
    alone = (points < 0xA0) | (points - np.uint16(0x152) < 2)
    is_mark = points - np.uint16(0x2010) < 0x20
    beside = np.append(places[1:], -1) == places + width
    beside[:-1] &= ~(is_mark[:-1] & is_mark[1:])
    suspects: NDArray[np.intp] = places[alone | beside]
    return suspects


@cache
def _odd_beginnings() -> NDArray[np.bool_]:
    """By its first two bytes, whether a character can be odd."""
    table = np.zeros((256, 256), dtype=bool)
    table[0xC2:0xD5] = True
    table[0xE2, 0x80:0x98] = True
    table[0xEF, [0xAC, 0xBF]] = True
    return table


def _mended_line(line: str) -> str | None:
    if not _SIDE_BY_SIDE.search(line):
        return line
    try:
        ftfy = optional("ftfy")
    except Unreadable:
        return None if _PLAINLY_BAD.search(line) else line
    mended: str = ftfy.fix_encoding(line) if ftfy.badness.is_bad(line) else line
    return mended


def _with_lines(text: bytes, lines: list[tuple[int, int, str | None]]) -> str | None:
    """The text with some of its lines replaced; None if one of them could not be mended."""
    pieces, at = [], 0
    for start, stop, line in lines:
        if line is None:
            return None
        pieces += [text[at:start], line.encode("utf-8", "surrogatepass")]
        at = stop
    return b"".join([*pieces, text[at:]]).decode("utf-8", "surrogatepass")
