"""What kind of text a document is: Chinese, Latin-script prose, code, or something else. Cheap, by a sample."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

from zero2all.corpus.code_paths import is_labeled_as_code
from zero2all.corpus.document import Document
from zero2all.corpus.filters.prose import extract_prose

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
