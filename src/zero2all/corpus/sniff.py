"""``z2a corpus sniff``: what a file is, and what a recipe should say of it."""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

import yaml

from zero2all.corpus.mapping import OURS, READY, propose
from zero2all.corpus.readers.base import BrokenRecord, Limits, Unreadable, WholeFile
from zero2all.corpus.readers.encoding import guess
from zero2all.corpus.readers.kinds import inner_name
from zero2all.corpus.readers.listing import RawFile, find_file
from zero2all.corpus.readers.records import look, read_records
from zero2all.corpus.readers.streams import HEAD, Stream
from zero2all.paths import is_url

RECORDS = 20  # looked at
SHOWN = 200  # characters of a value
NOT_TEXT = {"parquet", "zip", "tar"}
_LABELS = re.compile(r"(^|_)(id|url|uri|path|hash|sha|md5|date|time|lang|language|license|source)$", re.I)


def sniff(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Format, compression, encoding, fields and a mapping that fits, of one file or the first of a directory.

    ``source`` is the YAML of a source for the recipe; ``preview`` is the first document it would give.
    """
    given = os.fspath(path)
    file = find_file(given)
    found: dict[str, Any] = {"path": given, "file": file.name, "bytes": file.bytes, "fingerprint": file.fingerprint}
    try:
        found |= _outside(file)
        records, broken = _first_records(file)
    except Unreadable as reason:
        return {**found, "unreadable": str(reason)}
    found |= {"records_seen": len(records), "broken": broken, "fields": _fields(records)}
    choice = _choice(records)
    mapping = READY[choice.get("mapping", "automatic")].with_rules(choice.get("fields", {}))
    preview = (mapping.row(records[0]) if records else None) or {}
    return {
        **found,
        "mapping": choice.get("mapping"),
        "mapping_fields": choice.get("fields", {}),
        "preview": {ours: preview[ours][:SHOWN] for ours in OURS if ours in preview},
        "source": _yaml(given, file, choice),
    }


def _outside(file: RawFile) -> dict[str, Any]:
    try:
        with file.open() as raw:
            stream, compression, kind = look(Stream(raw), file.name, Limits())
            encoding = None if kind in NOT_TEXT else guess(stream.peek(HEAD)).name
    except (OSError, EOFError, ValueError) as error:
        raise Unreadable(f"broken file ({type(error).__name__})") from error
    return {"format": kind, "compression": compression, "encoding": encoding}


def _first_records(file: RawFile) -> tuple[list[dict[str, Any]], list[str]]:
    records, broken = [], []
    for record in islice(read_records(file), RECORDS):
        if isinstance(record, BrokenRecord):
            broken.append(f"{record.place}: {record.reason}")
        else:
            records.append(record)
    return records, broken


def _fields(records: list[dict[str, Any]]) -> dict[str, str]:
    """Every field with the type and the beginning of a value that is not empty."""
    fields: dict[str, str] = {}
    for record in records:
        for name, value in _flat(record):
            if name not in fields or fields[name].endswith(": "):
                fields[name] = f"{type(value).__name__}: {'' if value is None else str(value)[:SHOWN]}"
    return fields


def _flat(record: dict[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Names with the names above them, as a mapping writes them."""
    flat: list[tuple[str, Any]] = []
    for name, value in record.items():
        flat += _flat(value, f"{above}{name}.") if isinstance(value, dict) else [(f"{above}{name}", value)]
    return flat


def _choice(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The ready mapping, if it finds text; else the longest text field as content."""
    if not records or any(isinstance(record, WholeFile) for record in records):
        return {}
    names = set.intersection(*(set(record) for record in records)) or set(records[0])
    name = propose(names)
    if any(READY[name].row(record) for record in records):
        return {} if name == "automatic" else {"mapping": name}
    lengths: dict[str, int] = {}
    for record in records:
        for field, value in _flat(record):
            if isinstance(value, str) and not _LABELS.search(field):
                lengths[field] = lengths.get(field, 0) + len(value)
    return {"fields": {"content": max(lengths, key=lambda field: lengths[field])}} if lengths else {}


def _yaml(given: str, file: RawFile, choice: dict[str, Any]) -> str:
    stem = PurePosixPath(inner_name(file.name)[0]).stem if file.name else "source"
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-") or "source"
    place = given if is_url(given) else os.path.expanduser(given)
    source = {"name": name, "paths": [place], **choice}
    text: str = yaml.safe_dump({"corpus": {"sources": [source]}}, allow_unicode=True, sort_keys=False)
    return text
