"""Clean and bound the text itself: Unicode, leftovers of formats, language, length."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from zero2all.base.errors import need
from zero2all.base.plugins import register
from zero2all.corpus.document import Document
from zero2all.corpus.filters.filter_registry import KEEP, Change, Drop, FilterResult
from zero2all.corpus.filters.text_kinds import classify_text, split_listings, strip_html_comments

_LINE_ENDS = re.compile(r"\r\n?|[\x0b\x0c\x85\u2028\u2029]")
# Controls but tab and newline; soft hyphen, zero-width space, marks of direction, word joiner, BOM, non-characters.
_JUNK_RANGES = (
    "\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff"
    "\ufff9-\ufffb\ufffe\uffff"
)
_JUNK = re.compile(f"[{_JUNK_RANGES}]+")
# Joiners shape Persian, Indic scripts and emoji; after Latin or Han they are only junk.
_STRAY_JOINER = re.compile("(?<![^\x00-\u024f\u3000-\u9fff])[\u200c\u200d]+")
_UNWANTED_CHARACTER = re.compile(f"[{_JUNK_RANGES}\r\x0b\x0c\x85\u2028\u2029\u200c\u200d]")
_MANY_BLANK_LINES = re.compile(r"\n{5,}")


@register("filter", "normalize")
def normalize(document: Document) -> FilterResult:
    """One form for equal text, so that later filters and deduplication see it as equal.

    Prose: Unicode NFC, line ends as ``\\n``, control and zero-width characters removed, spaces at line ends removed,
    more than three blank lines made three. Full-width letters and punctuation stay: they are standard in Chinese.

    Code: ``\\r\\n`` becomes ``\\n`` (and ``\\r`` in a file that has no other line end), a BOM at the start and NUL go.
    Everything else, tabs and spaces at line ends included, stays byte for byte.
    """
    before = document.content
    after = _normalize_code(before) if classify_text(document) == "code" else normalize_prose(before)
    return KEEP if after == before else Change(after, "normalized")


def normalize_prose(text: str) -> str:
    text = text.replace("\r\n", "\n")
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    if _UNWANTED_CHARACTER.search(text):
        text = _JUNK.sub("", _LINE_ENDS.sub("\n", text))
        text = _STRAY_JOINER.sub("", text)
        if not text.isascii():  # what was removed may have stood between a letter and its accent
            text = unicodedata.normalize("NFC", text)
    text = "\n".join([line.rstrip() for line in text.split("\n")])
    return _MANY_BLANK_LINES.sub("\n\n\n\n", text) if "\n\n\n\n\n" in text else text


def _normalize_code(text: str) -> str:
    text = text.removeprefix("\ufeff").replace("\x00", "").replace("\r\n", "\n")
    return text if "\n" in text else text.replace("\r", "\n")


_GUTENBERG_START = re.compile(
    r"^\*{3} ?START OF TH(?:E|IS) PROJECT GUTENBERG EBOOK[^\n]{0,300}(?:\n[^\n]{1,300})?\*{3}", re.M
)
_GUTENBERG_SMALL_PRINT = re.compile(r"^\*END\*? ?THE SMALL PRINT![^\n]*\*END\*", re.MULTILINE)
_GUTENBERG_END = re.compile(
    r"^(?:\*{3} ?END OF TH(?:E|IS) PROJECT GUTENBERG|End of (?:the |this )?Project Gutenberg)", re.MULTILINE
)
_GUTENBERG_CREDIT = re.compile(
    r"\s*(?:\[?E-?text )?(?:Produced|prepared|Transcribed) (?:by|from) [^\n]+(?:\n[^\n]+)*", re.I
)


@register("filter", "strip_gutenberg")
def strip_gutenberg(document: Document) -> FilterResult:
    """Take off the header, the licence and the credits that Project Gutenberg puts around a book."""
    text = document.content
    if "roject Gutenberg" not in text and "PROJECT GUTENBERG" not in text:
        return KEEP
    text = text.replace("\r\n", "\n")
    start = _GUTENBERG_START.search(text) or _GUTENBERG_SMALL_PRINT.search(text)
    begin = start.end() if start else 0
    end = _GUTENBERG_END.search(text, begin)
    if not start and not end:
        return KEEP  # a text about the project, not a book from it
    body = text[begin : end.start() if end else len(text)]
    credit = _GUTENBERG_CREDIT.match(body) if start else None
    return Change(body[credit.end() if credit else 0 :].strip("\n") + "\n", "Gutenberg header and footer")


@register("filter", "html_comments")
def html_comments(document: Document) -> FilterResult:
    """Remove ``<!-- -->`` from prose, outside fenced listings. Kubernetes keeps whole English originals in them."""
    if "<!--" not in document.content or classify_text(document) == "code":
        return KEEP
    text = _transform_prose(document.content, strip_html_comments)
    return KEEP if text == document.content else Change(text, "HTML comments")


def _transform_prose(text: str, transform: Callable[[str], str]) -> str:
    if "```" not in text and "~~~" not in text:
        return transform(text)
    return "".join(piece if number % 2 else transform(piece) for number, piece in enumerate(split_listings(text)))


@register("filter", "language")
def language(
    document: Document,
    *,
    keep: tuple[str, ...] = ("zh", "en"),
    min_confidence: float = 0.5,
    min_chars: int = 100,
    sample_chars: int = 1000,
) -> FilterResult:
    """Keep some languages (ISO 639-1), as py3langid detects them in a sample from the middle.

    Code is never judged, nor text under ``min_chars`` (a third of it for Chinese). A text that ``classify_text`` calls
    Chinese is ``zh`` without asking: classical Chinese and dialects otherwise come out as Japanese or Wu. A guess
    below ``min_confidence`` drops nothing: quotes and tables confuse the model.
    """
    kind = classify_text(document)
    text = document.content
    if kind == "code" or len(text) < (min_chars // 3 if kind == "zh" else min_chars):
        return KEEP
    if kind == "zh":
        return KEEP if "zh" in keep else Drop("language zh")
    begin = max(0, (len(text) - sample_chars) // 2)
    found, confidence = _language_identifier().classify(text[begin : begin + sample_chars])
    if found in keep or confidence < min_confidence:
        return KEEP
    return Drop(f"language {found}")


@lru_cache(maxsize=1)
def _language_identifier() -> Any:
    langid = need("py3langid.langid", "corpus")
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


@register("filter", "too_short")
def too_short(
    document: Document, *, min_chars: int = 50, min_chars_zh: int = 12, min_chars_code: int = 20
) -> FilterResult:
    """Drop what is too short to teach anything; white space does not count.

    A Chinese character says about as much as three letters: a five-character quatrain has 20 and is a complete poem.
    """
    kind = classify_text(document)
    limit = {"zh": min_chars_zh, "code": min_chars_code}.get(kind, min_chars)
    return KEEP if sum(map(len, document.content.split())) >= limit else Drop("too short")


@register("filter", "too_long")
def too_long(document: Document, *, max_chars: int = 10_000_000, max_chars_code: int = 1_000_000) -> FilterResult:
    """Drop what is longer than any book (or source file) should be: dumps, logs, data tables."""
    limit = max_chars_code if classify_text(document) == "code" else max_chars
    return KEEP if len(document.content) <= limit else Drop("too long")
