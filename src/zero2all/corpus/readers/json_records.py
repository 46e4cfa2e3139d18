"""JSON in its shapes: one value a line, one array, one object, or an object that holds the list."""

from __future__ import annotations

import io
import json
import re
import reprlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import orjson

from zero2all.base.plugins import register
from zero2all.corpus.chat_shapes import has_messages, is_message_list
from zero2all.corpus.mapping import DEFAULT_FIELD_NAMES, HTML_SUFFIX
from zero2all.corpus.readers.base import (
    MAX_NESTING,
    TOO_DEEP,
    BrokenRecord,
    ReadLimits,
    RecordChunk,
    UnreadableFileError,
)
from zero2all.corpus.readers.encoding import decode_stream, decode_text, to_utf8
from zero2all.corpus.readers.streams import PeekableStream, iter_line_chunks

MAX_IN_MEMORY_BYTES = 16 << 20  # an object up to this size is read fully, and needs no streaming parser
FIRST_WINDOW_CHARACTERS = 1 << 14  # where a value is searched for first: an error costs as much as the text before it
MAX_FALSE_LISTS = 100  # texts that look like the beginning of a list; each costs as much as the text before it
_NEXT_OBJECT = re.compile(r"\n[^\S\n]*\{|\}\s*,\s*\{|[\]\[]\s*\{")
_RECORD_LIST = re.compile(r":\s*\[(?=\s*\{)")
_OPENING = re.compile(r"[\[{]")
_BETWEEN = re.compile(r"[\s,]*")
_SPACE = re.compile(r"\s*")


@register("reader", "jsonl", extensions=(".jsonl", ".ndjson"), chunked=True)
def read_jsonl(stream: PeekableStream, name: str, limits: ReadLimits) -> Iterator[RecordChunk]:
    """One value per line, in chunks."""
    return parse_jsonl(to_utf8(stream, replace_errors=False), limits)


def parse_jsonl(stream: PeekableStream, limits: ReadLimits, location_prefix: str = "") -> Iterator[RecordChunk]:
    """Lines that are UTF-8. ``location_prefix`` names the range of the file that they are from."""
    number = 1
    for chunk in iter_line_chunks(stream, limits.record_bytes):
        yield [
            _parse_line(line, f"{location_prefix}line {place}", limits)
            for place, line in enumerate(chunk, number)
            if line is None or line.strip()
        ]
        number += len(chunk)


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


@register("reader", "json array")
def read_json_array(stream: PeekableStream, name: str, limits: ReadLimits) -> Iterator[dict[str, Any] | BrokenRecord]:
    """The elements of an array one by one, whatever its length; a broken one does not affect the others."""
    records = _read_array_elements(decode_stream(stream), limits)
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


def _read_array_elements(
    blocks: Iterator[str], limits: ReadLimits, *, is_inside: bool = False
) -> Iterator[dict[str, Any] | BrokenRecord]:
    """``is_inside``: what follows the array is not read."""
    scanner = _JsonScanner(blocks, limits.record_bytes)
    scanner.skip(re.compile("\ufeff?\\s*\\[?"))
    while scanner.skip(_BETWEEN):
        if scanner.next_is("]"):
            if is_inside or not scanner.skip_closing():
                return
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

    def parse_value(self) -> Any:
        size = FIRST_WINDOW_CHARACTERS
        while True:
            text = self._text[self._position : self._position + size]
            is_all = self._position + size >= len(self._text)
            try:
                value, end = self._decode(text)
            except json.JSONDecodeError as error:
                if not _is_unfinished(error, text):
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


@register("reader", "json object", extensions=(".json",))
def read_json_object(stream: PeekableStream, name: str, limits: ReadLimits) -> Iterator[dict[str, Any] | BrokenRecord]:
    """A file that is one object: the record itself, or what holds the list of them."""
    head = stream.peek(MAX_IN_MEMORY_BYTES + 1)
    if len(head) <= MAX_IN_MEMORY_BYTES:
        yield from _read_small_object(head, limits)
        return
    blocks = decode_stream(stream)
    begun, size = [""], 0
    while size <= MAX_IN_MEMORY_BYTES and (block := next(blocks, None)) is not None:
        begun.append(block)
        size += len(block)
    text = "".join(begun).lstrip("\ufeff \t\r\n")
    start = _find_record_list(text)
    yield from _read_array_elements(chain([text[start or 0 :]], blocks), limits, is_inside=start is not None)


def _find_record_list(text: str) -> int | None:
    """Where the longest list of objects begins in this object; None if another object follows, or it has none."""
    decode = json.JSONDecoder().raw_decode
    with suppress(ValueError, RecursionError):
        if text[decode(text)[1] :].strip():
            return None
    longest, start, at, failures = 0, None, 0, 0
    while failures < MAX_FALSE_LISTS and (found := _RECORD_LIST.search(text, at)):
        try:
            elements, at = decode(text, found.end() - 1)
        except json.JSONDecodeError as error:
            if _is_unfinished(error, text):
                return found.end() - 1
            at, failures = found.end(), failures + 1
        except (ValueError, RecursionError):
            return found.end() - 1
        else:
            if len(elements) > longest:
                longest, start = len(elements), found.end() - 1
    return start


def _is_unfinished(error: json.JSONDecodeError, text: str) -> bool:
    return error.pos >= len(text) - 16 or error.msg.startswith("Unterminated")


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
    as_lines = list(chain.from_iterable(read_jsonl(PeekableStream(io.BytesIO(data)), "", limits)))
    in_a_row = list(_read_array_elements(iter([text]), limits))
    best = max((as_lines, in_a_row), key=_count_valid)
    if all(isinstance(record, BrokenRecord) for record in best):
        raise UnreadableFileError(TOO_DEEP if isinstance(error, RecursionError) else "broken JSON") from error
    return best


def _count_valid(records: RecordChunk) -> int:
    return sum(not isinstance(record, BrokenRecord) for record in records)
