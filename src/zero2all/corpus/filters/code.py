"""Source files that nobody wrote, or that may not be used."""

from __future__ import annotations

import json
import re
from typing import Any

from zero2all.base.package_data import read_package_table
from zero2all.base.plugins import register
from zero2all.corpus.document import Document
from zero2all.corpus.filters.filter_registry import KEEP, Drop, FilterResult
from zero2all.corpus.filters.text_kinds import classify_text

_HEAD_LINES = 12
_COMMENT_MARK = re.compile(r"\s*(?:#|//|/\*|\*|--|;|%|<!--|\"\"\"|'''|\(\*)")
_GENERATED = re.compile(
    r"@generated\b|\bauto-?generated\b|\bautomatically generated\b"
    r"|(?:\b(?:was|is|been|file|code)|#|//|\*|--|\"\"\"|<!--)\s*generated (?:by|from|with)\b"
    r"|\bgenerated\b.{0,80}\bdo not (?:edit|modify)\b|\bdo not (?:edit|modify)\b.{0,80}\bgenerated\b"
    r"|自动生成.{0,20}请勿(?:修改|编辑)|(?:文件|代码)由.{0,40}生成",
    re.IGNORECASE,
)
_ALNUM = bytes(value for value in range(256) if value >= 128 or chr(value).isalnum())


@register("filter", "code_generated")
def code_generated(document: Document) -> FilterResult:
    """Drop code that a program wrote: it says so in a comment at its head, or it is minified or a table of data.

    The limits on lines and on the share of letters and digits are StarCoder's (mean 100, longest 1,000
    characters, 25%; https://arxiv.org/abs/2305.06161). A byte above ASCII counts as a letter.
    """
    if classify_text(document) != "code":
        return KEEP
    text = document.content
    lines = text.splitlines()
    if any(_COMMENT_MARK.match(line) and _GENERATED.search(line) for line in lines[:_HEAD_LINES]):
        return Drop("says that it is generated")
    lengths = [len(line) for line in lines]
    if not lengths or sum(lengths) > 100 * len(lengths):
        return Drop("long lines on average")
    if max(lengths) > 1000:
        return Drop("a very long line")
    data = text.encode("utf-8", "replace")
    solid = data.translate(None, b" \t\r\n")
    if len(solid) - len(solid.translate(None, _ALNUM)) < 0.25 * len(data):
        return Drop("few letters and digits")
    return KEEP


PERMISSIVE_LICENCES = (
    *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "ISC", "MIT", "MIT-0", "NCSA"),
    *("PSF-2.0", "Python-2.0", "Unlicense", "UPL-1.0", "WTFPL", "X11", "Zlib"),
)
_NO_PARENTHESES = str.maketrans("()", "  ")
_SPDX_LINE = re.compile(r"SPDX-License-Identifier:[ \t]*([A-Za-z0-9 .+()-]{2,80})")
_LICENCE_FIELDS = ("license", "licence", "licenses", "spdx", "max_stars_repo_licenses", "detected_licenses")
_LICENCE_PHRASES = [
    (re.compile(licence["pattern"], re.IGNORECASE), licence["spdx"])
    for licence in read_package_table(__package__, "licence_phrases.toml")["licences"]
]
_HEADER_CHARS = 3000


@register("filter", "code_licence")
def code_licence(
    document: Document, *, allowed: tuple[str, ...] = PERMISSIVE_LICENCES, keep_unknown: bool = True
) -> FilterResult:
    """Keep code whose licence is in ``allowed`` (SPDX ids, permissive ones if not given).

    The licence is what the record says in ``others`` (a field such as ``license``), else an SPDX line or a known
    phrase in the first 3,000 characters. Of ``A OR B`` one must be allowed, of ``A AND B`` both; several licences in
    a list are taken as AND. Code that says nothing is kept unless ``keep_unknown`` is off.
    """
    if classify_text(document) != "code":
        return KEEP
    found = find_licence(document)
    if not found:
        return KEEP if keep_unknown else Drop("licence unknown")
    names = {name.lower() for name in allowed}
    return KEEP if is_allowed(found, names) else Drop("licence not allowed")


def find_licence(document: Document) -> str:
    """An SPDX expression, or nothing where the document does not say."""
    stated = _stated_licence(document.others)
    if stated:
        return _known_phrase(stated) or stated
    head = document.content[:_HEADER_CHARS]
    line = _SPDX_LINE.search(head)
    return line.group(1).strip() if line else _known_phrase(head)


def _stated_licence(others: str) -> str:
    if "icen" not in others and "spdx" not in others:
        return ""
    try:
        record: Any = json.loads(others)
    except (ValueError, RecursionError):
        return ""
    values = [record.get(name) for name in _LICENCE_FIELDS] if isinstance(record, dict) else []
    for value in values:
        if isinstance(value, str) and value.strip():
            return value.strip()
        if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            return " AND ".join(value)
    return ""


def _known_phrase(text: str) -> str:
    return next((spdx for phrase, spdx in _LICENCE_PHRASES if phrase.search(text)), "")


def is_allowed(expression: str, names: set[str]) -> bool:
    """``A OR B`` and ``A AND B`` without nesting; an exception after WITH only gives more rights."""
    words = expression.translate(_NO_PARENTHESES).lower().replace("/", " or ").split()
    return any(
        all(part.partition(" with ")[0].strip() in names for part in choice.split(" and "))
        for choice in " ".join(words).split(" or ")
    )
