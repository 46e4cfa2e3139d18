"""Files to records, one at a time. What cannot be read is counted with its reason, never fatal."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from zero2all.errors import UsageError
from zero2all.recipe import SourceRecipe

COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
JSON_LINES = {".jsonl", ".ndjson"}
PROSE = {".txt", ".md", ".rst"}
CODE = {
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala", ".js", ".ts",
    ".tsx", ".jsx", ".rb", ".php", ".cs", ".swift", ".sh", ".sql", ".lua", ".jl", ".r", ".hs", ".ml", ".proto",
}  # fmt: skip
NEVER_ENTERED = {"__pycache__", "node_modules", "site-packages", "dist-packages"}
WHOLE_JSON_LIMIT = 64 * 2**20


class Unreadable(Exception):
    """This file is left out; the message is the reason it is counted under."""


@dataclass(frozen=True)
class RawFile:
    path: Path
    name: str  # below the path that the recipe gives, with forward slashes on every system, as clean text
    bytes: int
    modified_ns: int

    @classmethod
    def at(cls, path: Path, top: Path) -> RawFile:
        name = path.relative_to(top).as_posix() if path != top else path.name
        clean = os.fsencode(name).decode("utf-8", "replace")
        try:
            stat = path.stat()
        except OSError:  # a dangling link, say: opening it fails later, and is counted then
            return cls(path, clean, 0, 0)
        return cls(path, clean, stat.st_size, stat.st_mtime_ns)


class BrokenRecord(dict[str, Any]):
    """Stands for a record that could not be parsed, so that it can be counted."""


class WholeFile(dict[str, Any]):
    """A record made of a file that is one text; a recipe's field names do not apply to it."""


def list_files(source: SourceRecipe) -> list[RawFile]:
    """Every file of a source in a fixed order."""
    found: dict[Path, RawFile] = {}
    for pattern in source.paths:
        pattern = os.path.expanduser(pattern)
        tops = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not tops:
            raise UsageError(f"corpus source {source.name!r}: nothing at {pattern}")
        for top in map(Path, tops):
            for path in sorted(_walk(top, set())) if top.is_dir() else [top]:
                file = RawFile.at(path, top)
                if not any(fnmatch(file.name, excluded) for excluded in source.exclude):
                    found.setdefault(path, file)
    return list(found.values())


def _walk(directory: Path, entered: set[Path]) -> Iterator[Path]:
    """Every file below; links are followed once. A directory that may not be entered stands for itself."""
    entered.add(directory.resolve())
    try:
        entries = list(directory.iterdir())
    except OSError:
        yield directory
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in NEVER_ENTERED:
            continue
        if not entry.is_dir():
            yield entry
        elif entry.resolve() not in entered:
            yield from _walk(entry, entered)


def read_records(file: RawFile) -> Iterator[dict[str, Any]]:
    """Records of a file in their order; raises Unreadable for a format that is not known."""
    inner = Path(file.name)
    compression = COMPRESSED.get(inner.suffix.lower())
    if compression:
        inner = inner.with_suffix("")
    suffix = inner.suffix.lower()
    try:
        if suffix == ".parquet" and not compression:
            yield from _parquet(file.path)
        elif suffix in JSON_LINES:
            yield from _json_lines(_open(file.path, compression))
        elif suffix == ".json":
            yield from _json(file.path, compression)
        elif suffix in PROSE | CODE:
            text = _text(_open(file.path, compression))
            yield WholeFile(id=file.name, title=file.name, content=text)
        else:
            raise Unreadable(f"format {_ending(file.name)}")
    except (OSError, ValueError, pa.ArrowException) as error:
        raise Unreadable(f"broken file ({type(error).__name__})") from error


def _ending(name: str) -> str:
    suffixes = Path(name).suffixes
    tar = suffixes[-2:-1] == [".tar"]
    return "".join(suffixes[-2:] if tar else suffixes[-1:]) or "without an ending"


def _open(path: Path, compression: str | None) -> IO[bytes]:
    # Through Python's open, which takes names that are not UTF-8; it closes with its last reader.
    raw = open(path, "rb")  # noqa: SIM115
    stream: IO[bytes] = pa.CompressedInputStream(pa.PythonFile(raw), compression) if compression else raw
    return stream


def _text(stream: IO[bytes]) -> str:
    try:
        return stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable("text that is not UTF-8") from error


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    pieces: list[bytes] = []  # of the line that is not finished yet; joined once, however long it is
    while block := stream.read(1 << 20):
        first, *rest = block.split(b"\n")
        pieces.append(first)
        if rest:
            yield b"".join(pieces)
            yield from rest[:-1]
            pieces = [rest[-1]]
    if any(pieces):
        yield b"".join(pieces)


def _json_lines(stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    for line in _lines(stream):
        if line.strip():
            yield _json_object(line)


def _json_object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError):
        return BrokenRecord()
    return value if isinstance(value, dict) else BrokenRecord()


def _json(path: Path, compression: str | None) -> Iterator[dict[str, Any]]:
    """``.json`` is used for one object a line, for one object a file, and for one array: look before reading."""
    head = _open(path, compression).read(1 << 20).removeprefix(b"\xef\xbb\xbf").lstrip()
    first_line, newline, _ = head.partition(b"\n")
    if newline and not isinstance(_json_object(first_line), BrokenRecord):
        yield from _json_lines(_open(path, compression))
        return
    data = _open(path, compression).read(WHOLE_JSON_LIMIT + 1)
    if len(data) > WHOLE_JSON_LIMIT:
        raise Unreadable(f"JSON value larger than {WHOLE_JSON_LIMIT >> 20} MiB")
    try:
        value = json.loads(data.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError) as error:
        records = list(_json_lines(_open(path, compression)))
        if all(isinstance(record, BrokenRecord) for record in records):
            raise Unreadable("broken JSON") from error
        yield from records  # lines after all, the first of them broken
        return
    for record in value if isinstance(value, list) else [value]:
        yield record if isinstance(record, dict) else BrokenRecord()


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as raw, pq.ParquetFile(raw) as table:
        for batch in table.iter_batches(batch_size=256):
            yield from _without_times(batch).to_pylist()


def _without_times(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Times as text: Python's own have no nanoseconds, and ours go to ``others`` as text anyway."""
    columns = [column.cast(pa.string()) if pa.types.is_temporal(column.type) else column for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
