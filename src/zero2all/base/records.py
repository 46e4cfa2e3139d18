"""Typed records of JSON: one dataclass per format, checked when it is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from zero2all.base.conversation import SourceKind
from zero2all.base.errors import Z2aError

Record = TypeVar("Record")


@dataclass(frozen=True)
class RestoreSummary:
    """Which state a start restored and why, in ``history.json`` and in failure reports."""

    step: int | None
    history: str | None
    where: str | None
    reason: str
    rejected: list[str]


@dataclass(frozen=True)
class DocumentShards:
    """One source in one split of the documents."""

    bytes: int
    shards: list[str]
    """File names, in the directory of the split."""
    kind: SourceKind = "text"


@dataclass(frozen=True)
class DocumentsManifest:
    """What later stages need of the manifest of a corpus."""

    key: str
    splits: dict[str, dict[str, DocumentShards]]
    """Shards by split and source."""
    files: dict[str, str]
    """sha256 of every shard."""

    @property
    def bytes(self) -> int:
        return sum(source.bytes for sources in self.splits.values() for source in sources.values())


@cache
def _adapter(record: Any) -> TypeAdapter[Any]:
    return TypeAdapter(record)


def to_json(record: object) -> Any:
    """A dataclass as parsed JSON, with keys in the order of its fields.

    >>> @dataclass(frozen=True)
    ... class Shard:
    ...     name: str
    ...     bytes: int
    >>> to_json(Shard("a.parquet", 12))
    {'name': 'a.parquet', 'bytes': 12}
    """
    return _adapter(cast("Hashable", type(record))).dump_python(record, mode="json", by_alias=True)


def decode_json(data: str | bytes) -> Any:
    """Parse JSON that may come from anywhere; whatever is wrong with it is a ``ValueError``.

    Python's own parser has another error for nesting that no file of ours has, and few callers remember it.

    >>> decode_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: nested too deeply
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Parsed JSON with every text changed, also the keys.

    >>> map_texts({"a": ["b", 1]}, str.upper)
    {'A': ['B', 1]}
    """
    if isinstance(value, dict):
        return {change(key): map_texts(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [map_texts(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value


def first_problem(error: ValidationError) -> str:
    """The first field that is wrong, and why, in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc']) or 'content'}: {first['msg']}"


def parse_record(record: type[Record], value: object, source: object) -> Record:
    """Make a dataclass of parsed JSON; an error names the source and the field.

    Unknown keys are ignored: a later version may have added them.

    >>> @dataclass(frozen=True)
    ... class Shard:
    ...     name: str
    ...     bytes: int
    >>> parse_record(Shard, {"name": "a.parquet", "bytes": 12}, "manifest.json")
    Shard(name='a.parquet', bytes=12)
    """
    try:
        parsed: Record = _adapter(cast("Hashable", record)).validate_python(value)
        return parsed
    except ValidationError as error:
        raise Z2aError(f"{source}: {first_problem(error)}; the file is damaged or of another version") from error
