"""Names of sources: text in any script, shown as written; in file names, ASCII."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator, Field

MAX_CHARACTERS = 180
# Control characters, invisible ones that change the text direction, lone surrogates, line separators.
_REFUSED_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
_JOINERS = "\u200c\u200d"  # of the category Cf too, but part of the spelling in Persian and Indic scripts
_SEPARATORS = "/\\@"  # of paths, and of a metric and its rank
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_READABLE_CHARACTERS = 40  # of a name that is not plain, in a file name


def _normalize(name: str) -> str:
    """One spelling of accents: a file system may return another than a keyboard types."""
    return unicodedata.normalize("NFC", name)


def _is_refused(char: str) -> bool:
    return char in _SEPARATORS or (unicodedata.category(char) in _REFUSED_CATEGORIES and char not in _JOINERS)


def _check_source_name(name: str) -> str:
    refused = sorted({char for char in name if _is_refused(char)})
    if refused:
        raise ValueError(f"must not contain {', '.join(map(ascii, refused))}")
    if name != name.strip():
        raise ValueError("must not begin or end with white space")
    return _normalize(name)


SourceName = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS), AfterValidator(_check_source_name)]
SourceReference = Annotated[str, AfterValidator(_normalize)]
"""The name of a source where another section refers to it."""


def to_source_name(label: str) -> str:
    """The nearest valid name to any text, such as the name of a directory."""
    name = "".join("_" if _is_refused(char) else char for char in _normalize(label))
    return name.strip()[:MAX_CHARACTERS].strip() or "text"


def source_file_name(name: str) -> str:
    """A source's name in file names: unchanged if it is plain ASCII, otherwise what is ASCII in it and a hash.

    Other characters would not survive every file system: some change the form of accents, some ignore case.
    """
    return name if _PLAIN.fullmatch(name) else _hashed_file_name(name)


def source_file_names(names: Iterable[str]) -> dict[str, str]:
    """``source_file_name`` by name. Of names that differ only in case, all but the first have a hash."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        file_name = source_file_name(name)
        found[name] = _hashed_file_name(name) if file_name.lower() in taken else file_name
        taken.add(file_name.lower())
    return found


def _hashed_file_name(name: str) -> str:
    ascii_part = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    readable = re.sub(r"[^A-Za-z0-9]+", "_", ascii_part).strip("_")[:_READABLE_CHARACTERS] or "source"
    return f"{readable}-{hashlib.blake2b(name.encode(), digest_size=6).hexdigest()}"
