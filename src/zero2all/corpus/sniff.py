"""``z2a corpus sniff``: the format of a file, and the recipe entry for it."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, Literal

import yaml

from zero2all.base.paths import is_url
from zero2all.corpus.chat_documents import record_mapping
from zero2all.corpus.chat_shapes import has_messages
from zero2all.corpus.mapping import DOCUMENT_FIELDS, MAPPING_PRESETS, find_preset
from zero2all.corpus.readers.base import BrokenRecord, ReadLimits, TextRecord, UnreadableFileError, UnreadableItemError
from zero2all.corpus.readers.encoding import detect_encoding
from zero2all.corpus.readers.formats import is_binary, strip_compression_extension
from zero2all.corpus.readers.listing import RawFile, find_file
from zero2all.corpus.readers.records import detect_format, read_records
from zero2all.corpus.readers.streams import HEAD_BYTES, PeekableStream
from zero2all.recipe import SourceRecipe
from zero2all.recipe.source_names import to_source_name

MAX_RECORDS = 20  # inspected
MAX_VALUE_CHARACTERS = 200  # characters of a value
_LABEL_FIELDS = re.compile(r"(^|_)(id|url|uri|path|hash|sha|md5|date|time|lang|language|license|source)$", re.I)


@dataclass(frozen=True)
class DetectedFormat:
    format: str
    compression: str | None
    encoding: str | None
    """None for binary formats."""


@dataclass(frozen=True)
class MappingChoice:
    """The keys of a source in a recipe that map its records; none for the default field names."""

    kind: Literal["chat"] | None = None
    mapping: str | None = None
    fields: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SniffedContent:
    """What is in the first records of a file."""

    records_seen: int
    broken: list[str]
    fields: dict[str, str]
    mapping: str | None
    mapping_fields: dict[str, str]
    preview: dict[str, str]
    """The first document, by field."""
    source: str
    """YAML of a source for the recipe."""


@dataclass(frozen=True)
class SniffedFile:
    """A file's format and content, as far as it could be read."""

    path: str
    file: str
    bytes: int
    fingerprint: str
    detected: DetectedFormat | None = None
    content: SniffedContent | None = None
    unreadable: str | None = None

    def to_json(self) -> dict[str, Any]:
        """One flat object, without what is not known."""
        shown = {"path": self.path, "file": self.file, "bytes": self.bytes, "fingerprint": self.fingerprint}
        for known in (self.detected, self.content):
            shown |= asdict(known) if known else {}
        return shown | ({"unreadable": self.unreadable} if self.unreadable is not None else {})


def sniff(path: str | os.PathLike[str]) -> SniffedFile:
    """Format, compression, encoding, fields and a mapping that fits, of one file or the first of a directory."""
    given = os.fspath(path)
    file = find_file(given)
    sniffed = SniffedFile(given, file.name, file.bytes, file.fingerprint)
    try:
        sniffed = replace(sniffed, detected=_detect_format(file))
        first = list(islice(read_records(file), MAX_RECORDS))
    except UnreadableFileError as reason:
        return replace(sniffed, unreadable=str(reason))
    records = [record for record in first if not isinstance(record, BrokenRecord)]
    choice = _choose_mapping(records)
    preview = _preview(records[0], choice) if records else {}
    content = SniffedContent(
        records_seen=len(records),
        broken=[f"{record.place}: {record.reason}" for record in first if isinstance(record, BrokenRecord)],
        fields=_fields(records),
        mapping=choice.mapping,
        mapping_fields=choice.fields,
        preview={ours: preview[ours][:MAX_VALUE_CHARACTERS] for ours in DOCUMENT_FIELDS if ours in preview},
        source=_source_yaml(given, file, choice),
    )
    return replace(sniffed, content=content)


def _preview(record: dict[str, Any], choice: MappingChoice) -> dict[str, str]:
    source = SourceRecipe(name="sniffed", paths=["file"], **{k: v for k, v in asdict(choice).items() if v})
    try:
        return record_mapping(source).map_record(record) or {}
    except UnreadableItemError:
        return {}


def _detect_format(file: RawFile) -> DetectedFormat:
    try:
        with file.open() as raw:
            stream, compression, kind = detect_format(PeekableStream(raw), file.name, ReadLimits())
            encoding = None if is_binary(kind) else detect_encoding(stream.peek(HEAD_BYTES)).name
    except (OSError, EOFError, ValueError) as error:
        raise UnreadableFileError(f"broken file ({type(error).__name__})") from error
    return DetectedFormat(kind, compression, encoding)


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


def _choose_mapping(records: list[dict[str, Any]]) -> MappingChoice:
    """The preset, if it finds text; else the longest text field as content."""
    if not records or any(isinstance(record, TextRecord) for record in records):
        return MappingChoice()
    if any(map(has_messages, records)):
        return MappingChoice(kind="chat")
    names = set.intersection(*(set(record) for record in records)) or set(records[0])
    name = find_preset(names)
    if any(MAPPING_PRESETS[name].map_record(record) for record in records):
        return MappingChoice() if name == "automatic" else MappingChoice(mapping=name)
    lengths: dict[str, int] = {}
    for record in records:
        for name, value in _flatten(record):
            if isinstance(value, str) and not _LABEL_FIELDS.search(name):
                lengths[name] = lengths.get(name, 0) + len(value)
    return MappingChoice(fields={"content": max(lengths, key=lengths.__getitem__)} if lengths else {})


def _source_yaml(given: str, file: RawFile, choice: MappingChoice) -> str:
    stem = PurePosixPath(strip_compression_extension(file.name)[0]).stem if file.name else "source"
    place = given if is_url(given) else os.path.expanduser(given)
    chosen = {key: value for key, value in asdict(choice).items() if value}
    source = {"name": to_source_name(stem), "paths": [place], **chosen}
    text: str = yaml.safe_dump({"corpus": {"sources": [source]}}, allow_unicode=True, sort_keys=False)
    return text
