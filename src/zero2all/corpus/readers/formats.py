"""File format detection: by name, unless the head of the file shows better."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import PurePosixPath

from zero2all.base.plugins import builtin
from zero2all.corpus.readers.base import UnreadableFileError
from zero2all.corpus.readers.encoding import detect_encoding, looks_binary
from zero2all.corpus.readers.streams import COMPRESSION_BY_EXTENSION, HEAD_BYTES

FileFormat = str
"""The name of a reader, or of an archive format."""
ARCHIVES = {".zip": "zip", ".whl": "zip", ".tar": "tar", ".7z": "7z", ".rar": "rar"}
_ARCHIVE_MAGIC = {b"7z\xbc\xaf\x27\x1c": "7z", b"Rar!\x1a\x07": "rar"}
PDF_HEADER_BYTES = 1024  # some servers put other bytes before it, and every viewer looks this far
EPUB_MEMBER = b"mimetypeapplication/epub+zip"  # the first member of the zip, not compressed
OLE_MAGIC = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # Word files with a password, or from before 2007
TAR_ALIASES = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz", ".tzst": ".tar.zst"}
TEXT_FILE_NAMES = {
    "license", "licence", "copying", "notice", "authors", "readme", "changelog", "changes", "contributors",
}  # fmt: skip


@cache
def format_by_extension() -> dict[str, FileFormat]:
    readers = {end: one.name for one in builtin("reader") for end in one.details.get("extensions", ())}
    return {**ARCHIVES, **readers}


@cache
def _format_by_magic() -> dict[bytes, FileFormat]:
    readers = {one.details["magic"]: one.name for one in builtin("reader") if "magic" in one.details}
    return {**_ARCHIVE_MAGIC, **readers}


@cache
def seekable_formats() -> frozenset[FileFormat]:
    """Formats that cannot be read from front to back."""
    return frozenset(one.name for one in builtin("reader") if one.details.get("seekable"))


def is_binary(file_format: FileFormat) -> bool:
    return file_format in seekable_formats() or file_format in ARCHIVES.values()


# Atomic: a comment that could end at any later "-->" as well would be tried at every one of them.
_HTML = re.compile(r"(?><\?xml[^>]*>|<!--.*?-->|\s+)*+<(?:!doctype\s+html|html)[\s>]", re.I | re.S)
_WIKI_DOC = re.compile(r'<doc\s+id="')
_ARRAY_OF_OBJECTS = re.compile(r"\[\s*(?:\{|\]|$)")


def strip_compression_extension(name: str) -> tuple[str, str | None]:
    """The name without its compression extension, and that compression."""
    path = PurePosixPath(name)
    extension = path.suffix.lower()
    if extension in TAR_ALIASES:
        name = name[: -len(extension)] + TAR_ALIASES[extension]
        path, extension = PurePosixPath(name), PurePosixPath(name).suffix
    compression = COMPRESSION_BY_EXTENSION.get(extension)
    return (name[: -len(extension)], compression) if compression else (name, None)


def file_extension(name: str) -> str:
    path = PurePosixPath(name)
    return "" if path.suffix[1:].isdigit() else path.suffix.lower()


def format_from_name(name: str) -> FileFormat | None:
    """The format by the name of a decompressed file."""
    if (
        PurePosixPath(name).name.split(".")[0].lower() in TEXT_FILE_NAMES
        and file_extension(name) not in format_by_extension()
    ):
        return "text"
    return format_by_extension().get(file_extension(name))


def guess_format(name: str, head: bytes) -> FileFormat:
    """What a file is, from its unpacked name and first bytes; raises UnreadableFileError with the reason if unknown."""
    named = format_from_name(name)
    if not head and named not in ("text", "markdown", "code", "jsonl"):
        raise UnreadableFileError("empty file")
    packed = _format_from_magic(head, named, has_extension=bool(file_extension(name)))
    if packed:
        return packed
    if named == "docx" and head.startswith(OLE_MAGIC):
        raise UnreadableFileError("encrypted, or an old Word file")
    if named is not None and (is_binary(named) or named == "warc"):
        raise UnreadableFileError(f"not {named}, though named so")
    if named in ("markdown", "code", "html"):  # these may hold anything, and what they hold is what they are
        return named
    if looks_binary(head):
        raise UnreadableFileError(
            "binary, not text" if named or not file_extension(name) else f"format {file_extension(name)}"
        )
    seen = _format_from_text(name, head, named)
    if seen:
        return seen
    if named:
        return named
    if file_extension(name):
        raise UnreadableFileError(f"format {file_extension(name)}")
    return "text"


def _format_from_magic(head: bytes, named: FileFormat | None, *, has_extension: bool) -> FileFormat | None:
    for magic, found in _format_by_magic().items():
        if head.startswith(magic):
            return found
    if named == "pdf" and b"%PDF-" in head[:PDF_HEADER_BYTES]:
        return "pdf"
    if head[257:262] == b"ustar":
        return "tar"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        if named in ("docx", "epub"):
            return named
        if head[30:].startswith(EPUB_MEMBER):
            return "epub"
        # Tables, slides and Java archives are zip files too, but not collections of texts.
        return "zip" if named or not has_extension else None
    return None


def _format_from_text(name: str, head: bytes, named: FileFormat | None) -> FileFormat | None:
    encoding = detect_encoding(head, is_complete=len(head) < HEAD_BYTES)
    text = head.decode(encoding.name, "replace").lstrip("\ufeff \t\r\n")
    if _WIKI_DOC.match(text):
        return "wikiextractor"
    if _HTML.match(text):
        return "html"
    is_json = file_extension(name) in (".json", ".jsonl", ".ndjson")
    if text.startswith("["):
        sure = _ARRAY_OF_OBJECTS.match(text) and (named != "jsonl" or not _is_object(text.partition("\n")[0]))
        return "json array" if sure or file_extension(name) == ".json" else None
    if text.startswith("{"):
        return _json_object_format(text, is_json=is_json, named=named)
    return None


def _json_object_format(text: str, *, is_json: bool, named: FileFormat | None) -> FileFormat | None:
    """``.json`` is used for one object a line and for one object a file, and JSON lines are found under any name."""
    first, _, rest = text.partition("\n")
    if named == "jsonl" or (_is_object(first) and rest.lstrip().startswith("{")):
        return "jsonl"
    return "json object" if is_json or (named is None and re.match(r'\{\s*"', text)) else None


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
