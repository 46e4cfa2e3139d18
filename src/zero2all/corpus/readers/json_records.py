"""JSON in its shapes: one value a line, one array, one object, or an object that holds the list."""

from __future__ import annotations

import io
import json
import re
import reprlib
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

import orjson

from zero2all.corpus.chat_shapes import has_messages, is_message_list
from zero2all.corpus.mapping import DEFAULT_FIELD_NAMES, HTML_SUFFIX
from zero2all.corpus.readers.base import (
    MAX_NESTING,
    TOO_DEEP,
    BrokenRecord,
    ReadLimits,
    RecordChunk,
    UnreadableFileError,
    import_optional,
)
from zero2all.corpus.readers.encoding import decode_stream, decode_text, to_utf8
from zero2all.corpus.readers.streams import CountingReader, PeekableStream, iter_line_chunks

MAX_IN_MEMORY_BYTES = 16 << 20  # an object up to this size is read fully, and needs no streaming parser
FIRST_WINDOW_CHARACTERS = (
    1 << 14
)  # characters in which a value is searched for first: an error costs as much as the text before it
MAX_PREFIX_CHARACTERS = 100_000  # characters of all names above a value
_NEXT_OBJECT = re.compile(r"\n[^\S\n]*\{|\}\s*,\s*\{|[\]\[]\s*\{")
_OPENING = re.compile(r"[\[{]")
_BETWEEN = re.compile(r"[\s,]*")
_SPACE = re.compile(r"\s*")


def read_jsonl(stream: PeekableStream, limits: ReadLimits) -> Iterator[RecordChunk]:
    """One value per line, in chunks."""
    return parse_jsonl(to_utf8(stream, replace_errors=False), limits)


def parse_jsonl(stream: PeekableStream, limits: ReadLimits, location_prefix: str = "") -> Iterator[RecordChunk]:
    """Lines that are UTF-8. ``location_prefix`` names the range of the file that they are from."""
    number = 1
    for chunk in iter_line_chunks(stream, limits.record_bytes):
        yield _parse_objects(chunk) or [
            _parse_line(line, f"{location_prefix}line {place}", limits)
            for place, line in enumerate(chunk, number)
            if line is None or line.strip()
        ]
        number += len(chunk)


def _parse_objects(lines: list[bytes | None]) -> RecordChunk:
    """All lines at once, or nothing if one of them needs separate parsing."""
    try:
        values = list(map(orjson.loads, lines))  # type: ignore[arg-type]
    except ValueError:
        return []
    return values if {*map(type, values)} == {dict} else []


def _parse_line(line: bytes | None, place: str, limits: ReadLimits) -> dict[str, Any] | BrokenRecord:
    if line is None:
        return BrokenRecord(f"line longer than {limits.record_bytes >> 20} MiB", place)
    try:
        value = _loads(line)
    except UnicodeDecodeError:
        return BrokenRecord("not UTF-8", place, line.decode("utf-8", "replace"))
    except ValueError:
        return BrokenRecord("broken JSON", place, line.decode("utf-8", "replace"))
    except RecursionError:
        return BrokenRecord(TOO_DEEP, place, line.decode("utf-8", "replace"))
    return value if isinstance(value, dict) else _not_an_object(value, place)


def _loads(data: bytes) -> Any:
    """json knows some values that orjson refuses: NaN, and lone surrogates."""
    try:
        return orjson.loads(data)
    except ValueError:
        return json.loads(data)


def _not_an_object(value: Any, place: str) -> BrokenRecord:
    return BrokenRecord("not an object", place, reprlib.repr(value))  # of the outermost levels only


def read_json_array(stream: PeekableStream, limits: ReadLimits) -> Iterator[dict[str, Any] | BrokenRecord]:
    """The elements of an array one by one, whatever its length; a broken one does not affect the others."""
    records = _read_array_elements(stream, limits)
    first = next(records, None)
    if first is None:
        return
    if isinstance(first, BrokenRecord) and first.reason == "broken JSON":
        first_valid = next((record for record in records if not isinstance(record, BrokenRecord)), None)
        if first_valid is None:
            raise UnreadableFileError("broken JSON")
        yield first
        yield first_valid
    else:
        yield first
    yield from records


def _read_array_elements(stream: PeekableStream, limits: ReadLimits) -> Iterator[dict[str, Any] | BrokenRecord]:
    scanner = _JsonScanner(decode_stream(stream), limits.record_bytes)
    scanner.skip(re.compile("\ufeff?\\s*\\[?"))
    while scanner.skip(_BETWEEN):
        if scanner.next_is("]") and not scanner.skip_closing():
            return
        yield from scanner.parse_objects()
        if not scanner.skip(_BETWEEN) or scanner.next_is("]"):
            continue
        place = f"character {scanner.offset}"
        try:
            value = scanner.parse_value()
        except ValueError as error:
            yield BrokenRecord(str(error), place, scanner.excerpt())
            if not scanner.resync():
                return
        else:
            yield value if isinstance(value, dict) else _not_an_object(value, place)


class _JsonScanner:
    """JSON values out of a sliding window of text, which grows only as far as the longest value."""

    def __init__(self, blocks: Iterator[str], limit: int) -> None:
        self._blocks, self._limit = blocks, limit
        self._text, self._position, self._discarded, self._ended = "", 0, 0, False
        self._tried = -1  # where the text ended when several objects were last tried at once
        self._decode = json.JSONDecoder().raw_decode

    @property
    def offset(self) -> int:
        return self._discarded + self._position

    def excerpt(self) -> str:
        return self._text[self._position : self._position + 300]

    def next_is(self, character: str) -> bool:
        return self._text.startswith(character, self._position)

    def _read_more(self) -> bool:
        """Another block, and at least as much again as there is, so that a long value is not tried too often."""
        if self._ended:
            return False
        self._discarded += self._position
        blocks, wanted = [self._text[self._position :]], len(self._text) - self._position
        self._position = 0
        while wanted >= 0:
            block = next(self._blocks, None)
            if block is None:
                self._ended = True
                break
            blocks.append(block)
            wanted -= max(len(block), 1)
        self._text = "".join(blocks)
        return True

    def skip(self, pattern: re.Pattern[str]) -> bool:
        """Past what matches; False at the end of everything."""
        while True:
            found = pattern.match(self._text, self._position)
            end = found.end() if found else self._position
            if end < len(self._text):
                self._position = end
                return True
            if not self._read_more():
                self._position = len(self._text)
                return False

    def skip_closing(self) -> bool:
        """Past the array's end; True if something follows, as in files that were put together by hand."""
        self._position += 1
        return self.skip(_SPACE)

    def parse_objects(self) -> RecordChunk:
        """All objects up to the last place where one seems to end, at once; nothing if that is not one.

        Between brackets they parse as one array only if it is, whatever stands in their strings.
        """
        if self._tried == self._discarded + len(self._text):
            return []
        self._tried = self._discarded + len(self._text)  # once per window
        end = self._text.rfind("},", self._position) + 1
        try:
            values: list[Any] = orjson.loads(f"[{self._text[self._position : end]}]") if end else []
        except ValueError:
            return []
        if {*map(type, values)} != {dict}:
            return []
        self._position = end
        return values

    def parse_value(self) -> Any:
        size = FIRST_WINDOW_CHARACTERS
        while True:
            text = self._text[self._position : self._position + size]
            is_all = self._position + size >= len(self._text)
            try:
                value, end = self._decode(text)
            except json.JSONDecodeError as error:
                unfinished = error.pos >= len(text) - 16 or error.msg.startswith("Unterminated")
                if not unfinished:
                    raise ValueError("broken JSON") from None
            except ValueError:  # a number of more digits than Python reads
                raise ValueError("broken JSON") from None
            except RecursionError:
                self._skip_openings()
                raise ValueError(TOO_DEEP) from None
            else:
                if end < len(text) or (is_all and self._ended):  # a number may go on in the next block
                    self._position += end
                    return value
            size *= 8
            if not is_all:
                continue
            if len(self._text) - self._position > self._limit:
                raise ValueError(f"JSON value larger than {self._limit >> 20} MiB")
            if not self._read_more():
                raise ValueError("broken JSON")

    def _skip_openings(self) -> None:
        """Past some of the brackets that were one too many: from each of them the same would be found again."""
        for _, opening in zip(range(MAX_NESTING), _OPENING.finditer(self._text, self._position), strict=False):
            self._position = opening.start()

    def resync(self) -> bool:
        """To the next place where an object seems to begin."""
        self._position = min(self._position + 1, len(self._text))
        while True:
            found = _NEXT_OBJECT.search(self._text, self._position)
            if found:
                self._position = found.end() - 1
                return True
            self._position = max(self._position, len(self._text) - 64)
            if not self._read_more():
                return False


def read_json_object(stream: PeekableStream, limits: ReadLimits) -> Iterator[dict[str, Any] | BrokenRecord]:
    """A file that is one object: the record itself, or what holds the list of them."""
    head = stream.peek(MAX_IN_MEMORY_BYTES + 1)
    if len(head) <= MAX_IN_MEMORY_BYTES:
        yield from _read_small_object(head, limits)
        return
    ijson = import_optional("ijson")
    source = _TeeReader(to_utf8(stream))
    key = _find_record_list(ijson, source)
    replay = source.rewind()
    try:
        if key is not None:
            found: Iterator[Any] = ijson.items(replay, f"{key}.item", use_float=True)
        else:
            found = ijson.items(replay, "", multiple_values=True, use_float=True)
        for number, value in enumerate(found):
            yield value if isinstance(value, dict) else _not_an_object(value, f"element {number}")
    except ijson.JSONError:
        yield BrokenRecord("broken JSON from here on", f"byte {replay.bytes}")


class _TeeReader:
    """Keeps what the search for the list has read, so that a stream is read only once."""

    MAX_LOOKAHEAD = 64 << 20

    def __init__(self, stream: PeekableStream) -> None:
        self._stream, self._buffered, self.bytes = stream, [b""], 0

    def read(self, size: int = 1 << 16, /) -> bytes:
        if self.bytes > self.MAX_LOOKAHEAD:
            raise UnreadableFileError(f"JSON value larger than {self.MAX_LOOKAHEAD >> 20} MiB")
        block = self._stream.read(size) if size else b""
        self._buffered.append(block)
        self.bytes += len(block)
        return block

    def rewind(self) -> CountingReader:
        return CountingReader(PeekableStream(self._stream, b"".join(self._buffered)))


def _find_record_list(ijson: Any, source: _TeeReader) -> str | None:
    """The key of the longest list of objects in the first object, as far as that is read; None without one."""
    objects: Counter[str] = Counter()
    try:
        # Numbers as C has them: making a Python int of more than 4300 digits, ijson's compiled parser crashes.
        for prefix, event, _ in ijson.parse(source, buf_size=1 << 16, use_float=True):
            if len(prefix) > MAX_PREFIX_CHARACTERS:  # and costs its own length for every level
                raise UnreadableFileError(TOO_DEEP)
            if event == "start_map" and prefix.endswith(".item") and prefix.count(".item") == 1:
                objects[prefix.removesuffix(".item")] += 1
            if (event == "end_map" and prefix == "") or (objects and source.bytes > source.MAX_LOOKAHEAD // 2):
                break
    except ijson.JSONError:
        pass  # reported where it is read again
    return max(objects, key=objects.__getitem__, default=None)


def _read_small_object(data: bytes, limits: ReadLimits) -> Iterator[dict[str, Any] | BrokenRecord]:
    text = decode_text(data).lstrip("\ufeff")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        yield from _read_concatenated_objects(text, data, limits, error)
        return
    if not isinstance(value, dict):
        yield _not_an_object(value, "")
        return
    lists: list[list[Any]] = [part for part in value.values() if isinstance(part, list)]
    content = [name.removesuffix(HTML_SUFFIX) for name in DEFAULT_FIELD_NAMES["content"]]
    is_conversation = (
        has_messages(value) or any(map(is_message_list, lists)) or {"instruction", "output"} <= value.keys()
    )
    inside = [] if is_conversation else [part for part in lists if any(isinstance(element, dict) for element in part)]
    if inside and not any(isinstance(value.get(name), str) for name in content):
        longest = max(inside, key=len)
        for number, part in enumerate(longest):
            yield part if isinstance(part, dict) else _not_an_object(part, f"element {number}")
    else:
        yield value


def _read_concatenated_objects(text: str, data: bytes, limits: ReadLimits, error: Exception) -> RecordChunk:
    """Objects one after the other, each over several lines; or lines after all, the first of them broken."""
    as_lines = list(chain.from_iterable(read_jsonl(PeekableStream(io.BytesIO(data)), limits)))
    in_a_row = list(_read_array_elements(PeekableStream(io.BytesIO(data)), limits))
    best = max((as_lines, in_a_row), key=_count_valid)
    if all(isinstance(record, BrokenRecord) for record in best):
        raise UnreadableFileError(TOO_DEEP if isinstance(error, RecursionError) else "broken JSON") from error
    return best


def _count_valid(records: RecordChunk) -> int:
    return sum(not isinstance(record, BrokenRecord) for record in records)
