"""The running text of a document, as the quality rules measure it: without listings, formulas, comments and links."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
import numpy.typing as npt

_FENCE_LINE = re.compile(r"^[ \t]{0,8}(`{3,}+|~{3,}+)[^\n]*+", re.MULTILINE)
_LINE_END = re.compile(r"[^\S\n]*\n?")
_INDENTED = re.compile(r"(?:^|(?<=\n\n))(?:(?: {4}|\t)[^\n]*\n|\n(?= {4}|\t))+")
_FORMULA = re.compile(r"\$\$[^$]{1,3000}\$\$|\$[^$\n]{1,500}\$")
_LINK_TARGET = re.compile(r"^ {0,3}\[[^\]\n]{1,80}\]:[^\n]*$", re.MULTILINE)
_ADDRESS = re.compile(r"\]\([^()\s]{1,1000}\)|https?://[^\s<>()\[\]\"'，。；）]{1,1000}")
_TAG_ALONE = re.compile(r"^[ \t]*</?[A-Za-z][^<>\n]{0,200}>[ \t]*$", re.MULTILINE)
_MACRO = re.compile(r"\{\{[^{}\n]{0,300}\}\}")


def strip_html_comments(text: str) -> str:
    """An opening without an end stays, and everything behind it."""
    pieces, at = [], 0
    while (begin := text.find("<!--", at)) >= 0 and (end := text.find("-->", begin + 4)) >= 0:
        pieces.append(text[at:begin])
        line_end = _LINE_END.match(text, end + 3)
        assert line_end is not None  # it matches nothing, too
        at = line_end.end()
    return "".join([*pieces, text[at:]])


def split_listings(text: str) -> list[str]:
    """Prose and fenced listings in turn, beginning with prose. A fence without an end is prose.

    A listing ends at the first fence that is at least as long as its own. The end of every fence is found in one pass
    from the back, so that thousands of openings without an end cost no more than others.
    """
    fences = list(_FENCE_LINE.finditer(text))
    ends: list[int | None] = [None] * len(fences)
    later: dict[str, list[int]] = {"`": [], "~": []}  # by length, shortest last
    for number in range(len(fences) - 1, -1, -1):
        fence = fences[number][1]
        stack = later[fence[0]]
        while stack and len(fences[stack[-1]][1]) < len(fence):
            stack.pop()
        ends[number] = stack[-1] if stack else None
        stack.append(number)
    pieces, at, number = [], 0, 0
    while number < len(fences):
        end = ends[number]
        if end is not None:
            pieces += [text[at : fences[number].start()], text[fences[number].start() : fences[end].end()]]
            at, number = fences[end].end(), end
        number += 1
    return [*pieces, text[at:]]


@lru_cache(maxsize=2)  # several filters use the same text in turn
def extract_prose(text: str) -> str:
    """What is left may be empty. Indented blocks go only where something else stays: verse is indented too."""
    if "```" in text or "~~~" in text:
        text = "".join(split_listings(text)[::2])
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
