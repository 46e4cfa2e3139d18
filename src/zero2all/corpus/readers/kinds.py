"""What a file is: by its name, unless what stands at its head says better."""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath
from typing import Literal

from zero2all.corpus.code import PROGRAMS
from zero2all.corpus.readers.base import Unreadable
from zero2all.corpus.readers.encoding import guess, looks_binary
from zero2all.corpus.readers.streams import COMPRESSED, HEAD

Kind = Literal[
    "jsonl", "json array", "json object", "parquet", "csv", "text", "markdown", "code", "wikiextractor", "html", "warc",
    "zip", "tar",
]  # fmt: skip

PROSE = {".txt", ".text", ".tex", ".org", ".adoc"}
MARKUP = {".md", ".markdown", ".rst"}
BY_ENDING: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json object",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".warc": "warc",
    ".zip": "zip",
    ".whl": "zip",
    ".tar": "tar",
    **dict.fromkeys(PROSE, "text"),
    **dict.fromkeys(MARKUP, "markdown"),
    **dict.fromkeys(PROGRAMS, "code"),
}
SHORT_TAR = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz", ".tzst": ".tar.zst"}
PLAIN_NAMES = {"license", "licence", "copying", "notice", "authors", "readme", "changelog", "changes", "contributors"}

# Atomic: a comment that could end at any later "-->" as well would be tried at every one of them.
_HTML = re.compile(r"(?><\?xml[^>]*>|<!--.*?-->|\s+)*+<(?:!doctype\s+html|html)[\s>]", re.I | re.S)
_WIKI_DOC = re.compile(r'<doc\s+id="')
_ARRAY_OF_OBJECTS = re.compile(r"\[\s*(?:\{|\]|$)")


def inner_name(name: str) -> tuple[str, str | None]:
    """The name without the ending of its compression, and that compression."""
    path = PurePosixPath(name)
    ending = path.suffix.lower()
    if ending in SHORT_TAR:
        name = name[: -len(ending)] + SHORT_TAR[ending]
        path, ending = PurePosixPath(name), PurePosixPath(name).suffix
    compression = COMPRESSED.get(ending)
    return (name[: -len(ending)], compression) if compression else (name, None)


def ending_of(name: str) -> str:
    path = PurePosixPath(name)
    return "" if path.suffix[1:].isdigit() else path.suffix.lower()


def named_kind(name: str) -> Kind | None:
    """What the name of an unpacked file says."""
    if PurePosixPath(name).name.split(".")[0].lower() in PLAIN_NAMES and ending_of(name) not in BY_ENDING:
        return "text"
    return BY_ENDING.get(ending_of(name))


def kind_of(name: str, head: bytes) -> Kind:
    """What a file is, from its unpacked name and first bytes; raises Unreadable with the reason if it is nothing."""
    named = named_kind(name)
    if not head and named not in ("text", "markdown", "code", "jsonl"):
        raise Unreadable("empty file")
    packed = _packed_kind(name, head)
    if packed:
        return packed
    if named in ("zip", "tar", "parquet", "warc"):
        raise Unreadable(f"not {named}, though named so")
    if named in ("markdown", "code", "html"):  # these may hold anything, and what they hold is what they are
        return named
    if looks_binary(head):
        raise Unreadable("binary, not text" if named or not ending_of(name) else f"format {ending_of(name)}")
    seen = _textual_kind(name, head, named)
    if seen:
        return seen
    if named:
        return named
    if ending_of(name):
        raise Unreadable(f"format {ending_of(name)}")
    return "text"


def _packed_kind(name: str, head: bytes) -> Kind | None:
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"WARC/"):
        return "warc"
    if head[257:262] == b"ustar":
        return "tar"
    # Office files, books and Java archives are zip files too, but not collections of texts.
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")) and (named_kind(name) or not ending_of(name)):
        return "zip"
    return None


def _textual_kind(name: str, head: bytes, named: Kind | None) -> Kind | None:
    encoding = guess(head, ends=len(head) < HEAD)
    text = head.decode(encoding.name, "replace").lstrip("\ufeff \t\r\n")
    if _WIKI_DOC.match(text):
        return "wikiextractor"
    if _HTML.match(text):
        return "html"
    is_json = ending_of(name) in (".json", ".jsonl", ".ndjson")
    if text.startswith("["):
        sure = _ARRAY_OF_OBJECTS.match(text) and (named != "jsonl" or not _is_object(text.partition("\n")[0]))
        return "json array" if sure or ending_of(name) == ".json" else None
    if text.startswith("{"):
        return _object_kind(text, is_json, named)
    return None


def _object_kind(text: str, is_json: bool, named: Kind | None) -> Kind | None:
    """``.json`` is used for one object a line and for one object a file, and JSON lines are found under any name."""
    first, _, rest = text.partition("\n")
    rest = rest.lstrip()
    if _is_object(first) and (rest.startswith("{") or (named == "jsonl" and not rest)):
        return "jsonl"
    if named == "jsonl":
        return "jsonl"
    return "json object" if is_json or (named is None and re.match(r'\{\s*"', text)) else None


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
