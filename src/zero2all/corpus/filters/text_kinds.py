"""What kind of text a document is: Chinese, Latin-script prose, code, or something else. Cheap, by a sample.

And its running text, as the quality rules measure it: without listings, formulas, comments and links.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from zero2all.corpus.document import Document, is_labeled_as_code

TextKind = Literal["zh", "en", "code", "other"]

_SAMPLE_CHARS = 2400

# Han of all planes in use; kana and hangul tell Japanese and Korean from Chinese.
HAN = "\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
_NOT_HAN = re.compile(f"[^{HAN}]+")
_NOT_LATIN = re.compile(r"[^\u00c0-\u024f]+")
_ASCII = bytes(range(128))
_ASCII_NOT_LETTERS = bytes(value for value in range(128) if not chr(value).isalpha())
_ALL_BUT_CODE_SIGNS = bytes(value for value in range(256) if value not in b"=(){};_[]")
_MIN_CODE_SIGNS = 0.02  # of the characters; prose has hardly any, and most prose is settled by that
_NOT_LETTER = re.compile(r"[\W\d_]+")
_NOT_KANA_OR_HANGUL = re.compile(r"[^\u3041-\u30ff\u1100-\u11ff\uac00-\ud7af]+")

_CODE_LINE = re.compile(
    r"\s*+(?:"
    r"(?:def|class|async def)\s++\w++.*:\s*(?:#.*)?$|(?:import|from)\s+[\w.]+(?:\s+(?:import|as)\s.*)?;?$"
    r"|#\s*(?:include|define|ifdef|ifndef|endif|pragma)\b|(?:if|elif|for|while|with|try|else|except|finally)\b.*:$"
    r"|(?:public|private|protected|static|func|fn|const|let|var|package|using|namespace)\s+\S.*[;{(]?$"
    r"|(?:return|raise|assert|yield|await)\b.{0,100}[\w)\]}'\";]$|[\w.\[\]\"']+(?:\s*[:,]\s*\w+)?\s*[-+*/|&]?=\s*\S.*$"
    r"|[\w.]+\(.*\)[;:]?$|[@#]\w+(?:\(.*\))?$|.*[;{}]$|//.*$|[)\]}]++[,;:)]*+$|['\"].*['\"],?$"
    r")"
)


def count_han(text: str) -> int:
    """How many Han characters a text has."""
    return 0 if text.isascii() else len(_NOT_HAN.sub("", _remove_ascii(text)))


def _count_scripts(text: str) -> tuple[int, int, str]:
    """Han characters, Latin letters, and all that is not ASCII."""
    plain = len(text.encode("ascii", "ignore").translate(None, _ASCII_NOT_LETTERS))
    if text.isascii():
        return 0, plain, ""
    beyond = _remove_ascii(text)
    return len(_NOT_HAN.sub("", beyond)), plain + len(_NOT_LATIN.sub("", beyond)), beyond


def _remove_ascii(text: str) -> str:
    """Patterns are slow and most prose in Latin letters is ASCII: take that out first, with bytes."""
    return text.encode("utf-8", "ignore").translate(None, _ASCII).decode()


@lru_cache(maxsize=8)  # every filter classifies the same document in turn
def classify_text(document: Document) -> TextKind:
    """``code`` by category, path or appearance; else ``zh`` or ``en`` by script; ``en`` is any prose in Latin letters.

    Japanese and Korean, and scripts that are neither Han nor Latin, are ``other``.
    """
    sample = _sample(document.content)
    if is_labeled_as_code(document.category, document.title, document.others):
        return "code"
    han, latin, beyond = _count_scripts(sample)
    if han and han * 3 < latin:  # Chinese with listings, links or originals in comments?
        sample = _sample(extract_prose(document.content))
        han, latin, beyond = _count_scripts(sample)
    # One Han character says about as much as three Latin letters.
    if han and han * 3 >= latin:
        return "other" if len(_NOT_KANA_OR_HANGUL.sub("", beyond)) > han * 0.1 else "zh"
    if _looks_like_code(sample):
        return "code"
    return "en" if latin and latin >= len(_NOT_LETTER.sub("", beyond)) else "other"


def _sample(text: str) -> str:
    """Head, middle and end: a licence, a preface or a table alone would mislead."""
    if len(text) <= _SAMPLE_CHARS:
        return text
    part, middle = _SAMPLE_CHARS // 3, len(text) // 2
    return f"{text[:part]}\n{text[middle : middle + part]}\n{text[-part:]}"


def _looks_like_code(sample: str) -> bool:
    """Most of its lines read like statements. Prose with a listing in it does not reach that."""
    if sample.startswith("#!") and sample[2:3] in "/ ":
        return True
    if len(sample.encode("utf-8", "replace").translate(None, _ALL_BUT_CODE_SIGNS)) < _MIN_CODE_SIGNS * len(sample):
        return False
    lines = [line for line in sample.splitlines()[:120] if line.strip()]
    return len(lines) >= 3 and sum(bool(_CODE_LINE.match(line)) for line in lines) > 0.6 * len(lines)


_FENCE_LINE = re.compile(r"^[ \t]{0,8}(`{3,}+|~{3,}+)[^\n]*+", re.MULTILINE)
_LINE_END = re.compile(r"[^\S\n]*\n?")
_INDENTED = re.compile(r"(?:^|(?<=\n\n))(?:(?: {4}|\t)[^\n]*\n|\n(?= {4}|\t))+")
_FORMULA = re.compile(r"\$\$[^$]{1,3000}\$\$|\$[^$\n]{1,500}\$")
_LINK_TARGET = re.compile(r"^ {0,3}\[[^\]\n]{1,80}\]:[^\n]*$", re.MULTILINE)
_ADDRESS = re.compile(r"\]\([^()\s]{1,1000}\)|https?://[^\s<>()\[\]\"'，。；）]{1,1000}")
_TAG_ALONE = re.compile(r"^[ \t]*</?[A-Za-z][^<>\n]{0,200}>[ \t]*$", re.MULTILINE)
_MACRO = re.compile(r"\{\{[^{}\n]{0,300}\}\}")
# In this order, each where its sign is in the text.
_LEFT_OUT = (
    ("<", _TAG_ALONE, ""),
    ("$", _FORMULA, " "),
    ("]:", _LINK_TARGET, ""),
    ("](", _ADDRESS, " "),
    ("http", _ADDRESS, " "),
    ("{{", _MACRO, " "),
)


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
    for sign, pattern, instead in _LEFT_OUT:
        if sign in text:
            text = pattern.sub(instead, text)
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
