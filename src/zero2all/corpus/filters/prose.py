"""The running text of a document, as the quality rules measure it: without listings, formulas, comments and links."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
import numpy.typing as npt

FENCED_BLOCK = re.compile(r"(^[ \t]{0,8}(`{3,}|~{3,})[^\n]*\n.*?^[ \t]{0,8}\2[^\n]*$)", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->[^\S\n]*\n?", re.DOTALL)
_LINE_END = re.compile(r"[^\S\n]*\n?")
_INDENTED = re.compile(r"(?:^|(?<=\n\n))(?:(?: {4}|\t)[^\n]*\n|\n(?= {4}|\t))+")
_FORMULA = re.compile(r"\$\$[^$]{1,3000}\$\$|\$[^$\n]{1,500}\$")
_LINK_TARGET = re.compile(r"^ {0,3}\[[^\]\n]{1,80}\]:[^\n]*$", re.MULTILINE)
_ADDRESS = re.compile(r"\]\([^()\s]{1,1000}\)|https?://[^\s<>()\[\]\"'，。；）]{1,1000}")
_TAG_ALONE = re.compile(r"^[ \t]*</?[A-Za-z][^<>\n]{0,200}>[ \t]*$", re.MULTILINE)
_MACRO = re.compile(r"\{\{[^{}\n]{0,300}\}\}")


def strip_html_comments(text: str) -> str:
    """Up to the last end of one: behind it every opening would be looked for in vain to the end of the text."""
    last = text.rfind("-->") + 3
    if last < 3:
        return text
    found = _LINE_END.match(text, last)
    last = found.end() if found else last
    return _COMMENT.sub("", text[:last]) + text[last:]


@lru_cache(maxsize=2)  # several filters use the same text in turn
def extract_prose(text: str) -> str:
    """What is left may be empty. Indented blocks go only where something else stays: verse is indented too."""
    if "```" in text or "~~~" in text:
        text = FENCED_BLOCK.sub("", text)
    if "<!--" in text:
        text = strip_html_comments(text)
    if "<" in text:
        text = _TAG_ALONE.sub("", text)
    if "$" in text:
        text = _FORMULA.sub(" ", text)
    if "]:" in text:
        text = _LINK_TARGET.sub("", text)
    if "](" in text or "http" in text:
        text = _ADDRESS.sub(" ", text)
    if "{{" in text:
        text = _MACRO.sub(" ", text)
    if "\n\n    " in text or "\n\n\t" in text:
        rest = _INDENTED.sub("", text)
        text = rest if 2 * len(rest) > len(text) else text
    return text


@lru_cache(maxsize=2)
def split_words(text: str) -> list[str]:
    """What white space separates. Shared between filters: do not change it."""
    return text.split()


def code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32)


def letter_mask(points: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """Which code points are letters; several times as fast as a pattern. Beyond the BMP all count as letters."""
    return _bmp_letter_table()[np.minimum(points, 0xFFFF)]


@lru_cache(maxsize=1)
def _bmp_letter_table() -> npt.NDArray[np.bool_]:
    letters = np.array([chr(point).isalpha() for point in range(0x10000)])
    letters[0xFFFF] = True  # where letter_mask maps everything beyond
    return letters
