"""Text that says the same thing again and again: Gopher's repetition rules, and repeated long lines."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from zero2all.base.plugins import register
from zero2all.corpus.document import Document
from zero2all.corpus.filters.filter_registry import KEEP, Change, Drop, FilterResult
from zero2all.corpus.filters.text_kinds import classify_text, code_points, extract_prose, letter_mask, split_words

_PARAGRAPH_BREAK = re.compile(r"\n\s*\n")
_ASCII_WORD = re.compile(r"[A-Za-z0-9_]+")
_LETTER = re.compile(r"[^\W_]")
_FENCES = ("```", "~~~")
_LISTING_PREFIXES = ("    ", "\t", "|", "+-")
MIN_TOP_REPEATS = 4
_FACTORS = tuple(np.uint64(pow(0x9E3779B97F4A7C15, power, 2**64)) for power in range(1, 33))

NgramShares = tuple[tuple[int, float], ...]
UInts = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]


@register("filter", "gopher_repetition")
def gopher_repetition(
    document: Document,
    *,
    top_n_grams: NgramShares = ((2, 0.2), (3, 0.18), (4, 0.16)),
    dup_n_grams: NgramShares = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.1)),
    top_n_grams_zh: NgramShares = ((3, 0.256), (5, 0.201), (6, 0.171)),
    dup_n_grams_zh: NgramShares = ((8, 0.198), (10, 0.182), (11, 0.167), (13, 0.154), (14, 0.14), (16, 0.127)),
) -> FilterResult:
    """Drop text that repeats itself (Rae et al. 2021, table A1, https://arxiv.org/abs/2112.11446).

    The same as published: the fractions of repeated lines and paragraphs, by number and by characters; of characters
    in the most frequent 2- to 4-gram; of characters in repeated 5- to 10-grams; all thresholds for English.

    Different: words are what white space separates. Listings, formulas, comments and addresses of links are not
    looked at. Blank lines, and lines without a letter or digit, count neither as lines nor as repeats. Characters in
    repeated n-grams are counted once each, at every place but the first. A most frequent n-gram needs
    ``MIN_TOP_REPEATS`` places: in short text two make no pattern.

    Chinese, and scripts that are neither Han nor Latin, are measured in characters without white space and signs,
    an ASCII word being one. A Chinese word has some 1.6 characters, so n words become round(1.6 n) characters; the
    thresholds are FineWeb-2's for ``cmn_Hani``. Code is not judged: it repeats by nature.

    Statutes and manuals repeat long terms: over half of the Chinese statutes tried have more than 20% of characters
    in repeated 8-grams. ``DEFAULT_FILTERS`` is wider there; for web text alone the values here are better.
    """
    kind = classify_text(document)
    if kind == "code":
        return KEEP
    text = extract_prose(document.content)
    paragraphs = [part for part in _PARAGRAPH_BREAK.split(text) if _LETTER.search(part)]
    reason = _repetition_reason(paragraphs, len(text), "paragraphs")
    if not reason:
        lines = [line for line in map(str.strip, text.split("\n")) if _LETTER.search(line)]
        reason = _repetition_reason(lines, len(text), "lines")
    if not reason:
        units = _word_units(text) if kind == "en" else _char_units(text)
        top, dup = (top_n_grams, dup_n_grams) if kind == "en" else (top_n_grams_zh, dup_n_grams_zh)
        reason = _top_ngram_reason(units, top) or _duplicate_ngram_reason(units, dup)
    return Drop(reason) if reason else KEEP


def _repetition_reason(parts: list[str], chars: int, what: str) -> str:
    """Why there are too many repeats among the parts, or nothing."""
    distinct = set(parts)
    repeated = len(parts) - len(distinct)
    if not repeated:
        return ""
    if repeated > 0.3 * len(parts):
        return f"repeated {what}"
    repeated_chars = sum(map(len, parts)) - sum(map(len, distinct))
    return f"characters in repeated {what}" if repeated_chars > 0.2 * chars else ""


@dataclass(frozen=True)
class TextUnits:
    """The words or characters of a text: a number for each, equal for equal ones, and the characters each takes."""

    ids: UInts
    lengths: Ints

    @cached_property
    def ends(self) -> Ints:
        ends = np.zeros(len(self.lengths) + 1, np.int64)
        self.lengths.cumsum(out=ends[1:])
        return ends

    @property
    def chars(self) -> int:
        return int(self.ends[-1])

    def ngram_characters(self, n: int) -> Ints:
        """Characters of each n-gram."""
        return self.ends[n:] - self.ends[:-n]

    def ngram_hashes(self, n: int) -> UInts:
        """64-bit hashes of all n-grams. Two shorter n-grams that overlap make a longer one, so it takes log n steps."""
        width, hashes = 1, self.ids
        for (
            factor
        ) in _FACTORS:  # another one at each step, or n-grams of the same parts in another order would be equal
            if width >= n:
                break
            step = min(width, n - width)
            joined = hashes[:-step] * factor  # wrapping around is what mixing is for
            joined += hashes[step:]
            width, hashes = width + step, joined
        return hashes


def _word_units(text: str) -> TextUnits:
    words = split_words(text)
    # Python's own hash differs between processes; only which words are equal matters here.
    ids = np.fromiter(map(hash, words), np.int64, len(words)).astype(np.uint64)
    return TextUnits(ids, np.fromiter(map(len, words), np.int64, len(words)) + 1)


def _char_units(text: str) -> TextUnits:
    points = code_points(_ASCII_WORD.sub(lambda word: _as_one_char(word[0]), text))
    ids = points[letter_mask(points)].astype(np.uint64)
    return TextUnits(ids, np.ones(len(ids), np.int64))


@lru_cache(maxsize=1 << 14)
def _as_one_char(word: str) -> str:
    # In an unassigned plane; letter_mask counts it as a letter.
    return chr(0x40000 + zlib.crc32(word.encode()) % 0xFFF0)


def _top_ngram_reason(units: TextUnits, shares: NgramShares) -> str:
    fitting = [(n, share) for n, share in sorted(shares) if len(units.ids) >= n + MIN_TOP_REPEATS - 1]
    if not fitting:
        return ""
    # No n-gram is more frequent than the most frequent of the shorter ones in it.
    most = _most_repeats(units.ngram_hashes(fitting[0][0]))
    for n, share in fitting:
        limit = share * units.chars
        if most < MIN_TOP_REPEATS or most * int(units.ngram_characters(n).max()) <= limit:
            continue
        _, first, counts = np.unique(units.ngram_hashes(n), return_index=True, return_counts=True)
        often = counts >= MIN_TOP_REPEATS
        if np.any(counts[often] * units.ngram_characters(n)[first[often]] > limit):
            return f"most frequent {n}-gram"
    return ""


def _most_repeats(hashes: UInts) -> int:
    ordered = np.sort(hashes)
    changes = (ordered[1:] != ordered[:-1]).nonzero()[0]
    if len(changes) == len(ordered) - 1:
        return 1
    if not len(changes):
        return len(ordered)
    longest = int((changes[1:] - changes[:-1]).max()) if len(changes) > 1 else 0  # np.diff is slow on short arrays
    return max(longest, int(changes[0]) + 1, len(ordered) - 1 - int(changes[-1]))


def _duplicate_ngram_reason(units: TextUnits, shares: NgramShares) -> str:
    """Shorter n-grams first: what they cover contains all that longer ones cover, so mostly one check is enough."""
    strictest = min((share for _, share in shares), default=1.0) * units.chars
    for n, share in sorted(shares):
        covered = _covered_by_repeats(units, n, strictest)
        if covered > share * units.chars:
            return f"repeated {n}-grams"
        if covered <= strictest:
            break
    return ""


def _covered_by_repeats(units: TextUnits, n: int, enough: float) -> int:
    """Characters in n-grams that occurred before; 0 at once when a bound shows that there are no more than enough."""
    if len(units.ids) <= n:
        return 0
    hashes = units.ngram_hashes(n)
    ordered = np.sort(hashes)
    repeats = int(np.count_nonzero(ordered[1:] == ordered[:-1]))
    if repeats * int(units.ngram_characters(n).max()) <= enough:
        return 0
    order = np.argsort(hashes, kind="stable")
    later = order[1:][hashes[order[1:]] == hashes[order[:-1]]]
    edges = np.zeros(len(units.ids) + 1, np.int64)
    edges[later] += 1
    edges[later + n] -= 1
    return int(units.lengths[np.cumsum(edges[:-1]) > 0].sum())


@register("filter", "repeated_lines")
def repeated_lines(
    document: Document, *, min_chars: int = 60, min_chars_zh: int = 20, allowed: int = 2
) -> FilterResult:
    """Remove a long line from its third time on; drop the text if such repeats are more than half of it.

    Short lines may repeat: refrains, table cells and dialogue do. Listings may too, fenced or indented, and rows of
    tables. Code is not judged.
    """
    kind = classify_text(document)
    if kind == "code":
        return KEEP
    long = min_chars_zh if kind == "zh" else min_chars
    seen: dict[str, int] = {}
    kept: list[str] = []
    removed, fenced = 0, False
    for line in document.content.split("\n"):
        bare = line.strip()
        fenced ^= bare.startswith(_FENCES)
        if len(bare) >= long and not fenced and not line.startswith(_LISTING_PREFIXES) and _LETTER.search(bare):
            seen[bare] = seen.get(bare, 0) + 1
            if seen[bare] > allowed:
                removed += len(line) + 1
                continue
        kept.append(line)
    if not removed:
        return KEEP
    if removed > 0.5 * len(document.content):
        return Drop("mostly repeated lines")
    return Change("\n".join(kept), "repeated lines")
