"""``z2a corpus sniff``: the format of a file, and the recipe entry for it."""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

import yaml

from zero2all.corpus.mapping import DOCUMENT_FIELDS, MAPPING_PRESETS, find_preset
from zero2all.corpus.readers.base import BrokenRecord, ReadLimits, TextRecord, UnreadableFileError
from zero2all.corpus.readers.encoding import detect_encoding
from zero2all.corpus.readers.formats import strip_compression_extension
from zero2all.corpus.readers.listing import RawFile, find_file
from zero2all.corpus.readers.records import detect_format, read_records
from zero2all.corpus.readers.streams import HEAD_BYTES, PeekableStream
from zero2all.paths import is_url

MAX_RECORDS = 20  # inspected
MAX_VALUE_CHARACTERS = 200  # characters of a value
BINARY_FORMATS = {"parquet", "zip", "tar"}
_LABEL_FIELDS = re.compile(r"(^|_)(id|url|uri|path|hash|sha|md5|date|time|lang|language|license|source)$", re.I)


def sniff(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Format, compression, encoding, fields and a mapping that fits, of one file or the first of a directory.

    ``source`` is the YAML of a source for the recipe; ``preview`` is the first document it would give.
    """
    given = os.fspath(path)
    file = find_file(given)
    result: dict[str, Any] = {"path": given, "file": file.name, "bytes": file.bytes, "fingerprint": file.fingerprint}
    try:
        result |= _describe_format(file)
        records, broken = _first_records(file)
    except UnreadableFileError as reason:
        return {**result, "unreadable": str(reason)}
    result |= {"records_seen": len(records), "broken": broken, "fields": _fields(records)}
    choice = _choose_mapping(records)
    mapping = MAPPING_PRESETS[choice.get("mapping", "automatic")].with_rules(choice.get("fields", {}))
    preview = (mapping.map_record(records[0]) if records else None) or {}
    return {
        **result,
        "mapping": choice.get("mapping"),
        "mapping_fields": choice.get("fields", {}),
        "preview": {ours: preview[ours][:MAX_VALUE_CHARACTERS] for ours in DOCUMENT_FIELDS if ours in preview},
        "source": _source_yaml(given, file, choice),
    }


def _describe_format(file: RawFile) -> dict[str, Any]:
    try:
        with file.open() as raw:
            stream, compression, kind = detect_format(PeekableStream(raw), file.name, ReadLimits())
            encoding = None if kind in BINARY_FORMATS else detect_encoding(stream.peek(HEAD_BYTES)).name
    except (OSError, EOFError, ValueError) as error:
        raise UnreadableFileError(f"broken file ({type(error).__name__})") from error
    return {"format": kind, "compression": compression, "encoding": encoding}


def _first_records(file: RawFile) -> tuple[list[dict[str, Any]], list[str]]:
    records, broken = [], []
    for record in islice(read_records(file), MAX_RECORDS):
        if isinstance(record, BrokenRecord):
            broken.append(f"{record.place}: {record.reason}")
        else:
            records.append(record)
    return records, broken


def _fields(records: list[dict[str, Any]]) -> dict[str, str]:
    """Every field with the type and the beginning of a value that is not empty."""
    fields: dict[str, str] = {}
    for record in records:
        for name, value in _flatten(record):
            if name not in fields or fields[name].endswith(": "):
                fields[name] = f"{type(value).__name__}: {'' if value is None else str(value)[:MAX_VALUE_CHARACTERS]}"
    return fields


def _flatten(record: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted names of nested fields, as a mapping writes them."""
    flat: list[tuple[str, Any]] = []
    for name, value in record.items():
        flat += _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return flat


def _choose_mapping(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The preset, if it finds text; else the longest text field as content."""
    if not records or any(isinstance(record, TextRecord) for record in records):
        return {}
    names = set.intersection(*(set(record) for record in records)) or set(records[0])
    name = find_preset(names)
    if any(MAPPING_PRESETS[name].map_record(record) for record in records):
        return {} if name == "automatic" else {"mapping": name}
    lengths: dict[str, int] = {}
    for record in records:
        for field, value in _flatten(record):
            if isinstance(value, str) and not _LABEL_FIELDS.search(field):
                lengths[field] = lengths.get(field, 0) + len(value)
    return {"fields": {"content": max(lengths, key=lambda field: lengths[field])}} if lengths else {}


def _source_yaml(given: str, file: RawFile, choice: dict[str, Any]) -> str:
    stem = PurePosixPath(strip_compression_extension(file.name)[0]).stem if file.name else "source"
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-") or "source"
    place = given if is_url(given) else os.path.expanduser(given)
    source = {"name": name, "paths": [place], **choice}
    text: str = yaml.safe_dump({"corpus": {"sources": [source]}}, allow_unicode=True, sort_keys=False)
    return text
