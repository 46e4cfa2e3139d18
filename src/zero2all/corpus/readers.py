"""Files to records, one at a time. What cannot be read is counted with its reason, never fatal."""

from __future__ import annotations

import glob
import json
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
    name: str  # below the path that the recipe gives, with forward slashes on every system


class BrokenRecord(dict[str, Any]):
    """Stands for a record that could not be parsed, so that it can be counted."""


class WholeFile(dict[str, Any]):
    """A record made of a file that is one text; a recipe's field names do not apply to it."""


def list_files(source: SourceRecipe) -> list[RawFile]:
    """Every file of a source in a fixed order."""
    found: dict[Path, RawFile] = {}
    for pattern in source.paths:
        matches = sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else [pattern]
        tops = [Path(match) for match in matches if Path(match).exists()]
        if not tops:
            raise UsageError(f"corpus source {source.name!r}: nothing at {pattern}")
        for top in tops:
            for path in sorted(_walk(top)) if top.is_dir() else [top]:
                name = path.relative_to(top).as_posix() if top.is_dir() else path.name
                if not any(fnmatch(name, excluded) for excluded in source.exclude):
                    found.setdefault(path, RawFile(path, name))
    return list(found.values())


def _walk(directory: Path) -> Iterator[Path]:
    for entry in directory.iterdir():
        if entry.name.startswith(".") or entry.name in NEVER_ENTERED:
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _walk(entry)
        elif entry.is_file():
            yield entry


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
    except (OSError, pa.ArrowException) as error:
        raise Unreadable(f"broken file ({type(error).__name__})") from error


def _ending(name: str) -> str:
    suffixes = Path(name).suffixes
    tar = suffixes[-2:-1] == [".tar"]
    return "".join(suffixes[-2:] if tar else suffixes[-1:]) or "without an ending"


def _open(path: Path, compression: str | None) -> IO[bytes]:
    stream: IO[bytes] = pa.input_stream(str(path), compression=compression)
    return stream


def _text(stream: IO[bytes]) -> str:
    try:
        return stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable("text that is not UTF-8") from error


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    tail = b""
    while block := stream.read(1 << 20):
        *lines, tail = (tail + block).split(b"\n")
        yield from lines
    if tail:
        yield tail


def _json_lines(stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    for line in _lines(stream):
        if line.strip():
            yield _json_object(line)


def _json_object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text.removeprefix(b"\xef\xbb\xbf"))
    except ValueError:
        return BrokenRecord()
    return value if isinstance(value, dict) else BrokenRecord()


def _json(path: Path, compression: str | None) -> Iterator[dict[str, Any]]:
    """``.json`` is used for one object a line, for one object a file, and for one array: look before reading."""
    first = next((line for line in _lines(_open(path, compression)) if line.strip()), b"")
    if isinstance(_json_object(first), BrokenRecord):
        yield from _whole_json(_open(path, compression))
    else:
        yield from _json_lines(_open(path, compression))


def _whole_json(stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    data = stream.read(WHOLE_JSON_LIMIT + 1)
    if len(data) > WHOLE_JSON_LIMIT:
        raise Unreadable(f"JSON value larger than {WHOLE_JSON_LIMIT >> 20} MiB")
    try:
        value = json.loads(data)
    except ValueError as error:
        raise Unreadable("broken JSON") from error
    for record in value if isinstance(value, list) else [value]:
        yield record if isinstance(record, dict) else BrokenRecord()


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path) as table:
        for batch in table.iter_batches(batch_size=256):
            yield from batch.to_pylist()
