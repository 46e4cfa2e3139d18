"""The published rules of Gopher, C4 and FineWeb for web text, with thresholds in characters for Chinese."""

from __future__ import annotations

import re
from itertools import filterfalse, islice

import numpy as np

from zero2all.base.plugins import register
from zero2all.corpus.document import Document
from zero2all.corpus.filters.filter_registry import KEEP, Change, Drop, FilterResult
from zero2all.corpus.filters.text_kinds import (
    classify_text,
    code_points,
    count_han,
    extract_prose,
    letter_mask,
    split_words,
)

MIN_STOP_WORDS = 2
_ENGLISH_STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
# Words of FineWeb-2's list for cmn_Hani, and the most frequent ones of classical prose, which has no 的.
_CHINESE_STOP_WORDS = re.compile("[的年在月是和日了於為有被人中为他與後也而由之不以其于者与则則我你]")
_BULLETS = ("•", "‣", "●", "○", "■", "◆")
_ELLIPSES = ("...", "…", "。。。")
_LETTER = re.compile(r"[^\W\d_]")
_WORD_CHAR = re.compile(r"\w")


@register("filter", "gopher_quality")
def gopher_quality(
    document: Document,
    *,
    min_words: int = 50,
    max_words: int = 100_000,
    max_word_length: float = 10,
    min_chars_zh: int = 80,
    max_chars_zh: int = 160_000,
) -> FilterResult:
    """Drop what does not look like running text (Rae et al. 2021, https://arxiv.org/abs/2112.11446).

    The same as published: 50 to 100,000 words; mean word length 3 to 10; hash signs and ellipses each at most a tenth
    of the words; at most 90% of lines starting with a bullet and 30% ending with an ellipsis; a letter in 80% of
    the words; two of the eight stop words.

    Different: words are what white space separates, and signs standing alone are not words; blank lines are not
    lines; listings, formulas, comments and addresses of links are not looked at; hash signs that start a line are
    Markdown headings and are not counted. A limit of 0 is no limit.

    Chinese: lengths are in letters, Han included (50 words are some 80); word length is not looked at; letters are
    60% of what is not white space (FineWeb-2 asks 73.5% of words, but punctuation is no word); stop words are asked
    of text from 200 letters on, because a poem may have none. Other scripts and code are not judged.
    """
    kind = classify_text(document)
    if kind not in ("zh", "en"):
        return KEEP
    text = extract_prose(document.content)
    if kind == "en":
        words = split_words(text)
        count = len(words)
        reason = _english_length_reason(words, min_words, max_words, max_word_length)
        few_stop_words = _lacks_english_stop_words(words)
    else:
        count = int(np.count_nonzero(letter_mask(code_points(text))))
        reason = _chinese_length_reason(text, count, min_chars_zh, max_chars_zh)
        few_stop_words = count >= 200 and _lacks_chinese_stop_words(text)
    reason = reason or _symbol_reason(text, 0.1 * count)
    if not reason and few_stop_words:
        reason = "no stop words"
    return Drop(reason) if reason else KEEP


def _english_length_reason(words: list[str], min_words: int, max_words: int, max_length: float) -> str:
    non_alphabetic = list(filterfalse(str.isalpha, words))
    signs = [word for word in non_alphabetic if not (word[0].isalnum() or _WORD_CHAR.search(word))]
    count = len(words) - len(signs)
    if count < max(1, min_words):
        return "too few words"
    if max_words and count > max_words:
        return "too many words"
    mean = (sum(map(len, words)) - sum(map(len, signs))) / count
    if mean < 3 or (max_length and mean > max_length):
        return "word length"
    without_letter = sum(not (word[0].isalpha() or _LETTER.search(word)) for word in non_alphabetic) - len(signs)
    return "too few words with letters" if count - without_letter < 0.8 * count else ""


def _chinese_length_reason(text: str, letters: int, min_chars: int, max_chars: int) -> str:
    if letters < max(1, min_chars):
        return "too few characters"
    if max_chars and letters > max_chars:
        return "too many characters"
    return "too few letters" if letters < 0.6 * sum(map(len, text.split())) else ""


def _symbol_reason(text: str, max_symbols: float) -> str:
    if text.count("#") > max_symbols and _hashes_in_lines(text) > max_symbols:
        return "too many hash signs"
    ellipses = text.count("...") + text.count("…") + text.count("。。。")
    if ellipses > max_symbols:
        return "too many ellipses"
    lines = [stripped for line in text.split("\n") if (stripped := line.strip())]
    if sum(line.startswith(_BULLETS) for line in lines) > 0.9 * len(lines):
        return "too many bullets"
    if ellipses and sum(line.endswith(_ELLIPSES) for line in lines) > 0.3 * len(lines):
        return "too many lines ending in an ellipsis"
    return ""


def _hashes_in_lines(text: str) -> int:
    return sum(line.lstrip().lstrip("#").count("#") for line in text.split("\n"))


def _lacks_english_stop_words(words: list[str]) -> bool:
    """Nearly every text has them among its first words."""
    found = (word for word in words if word.lower() in _ENGLISH_STOP_WORDS)
    return len(list(islice(found, MIN_STOP_WORDS))) < MIN_STOP_WORDS


def _lacks_chinese_stop_words(text: str) -> bool:
    return len(list(islice(_CHINESE_STOP_WORDS.finditer(text), MIN_STOP_WORDS))) < MIN_STOP_WORDS


_END_OF_LINE = (".", "?", "!", '"', "'", "”", "’")
_END_OF_LINE_ZH = (*_END_OF_LINE, "。", "？", "！", "；", "：", "」", "』", "）", ")", "》", "…")
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"'”’)\]]*+(?:\s|$)")
_SENTENCE_END_ZH = re.compile(r"[。！？!?；…]+|\.(?:\s|$)")
_CITATION = re.compile(r"\[(?:\d{1,4}|edit|citation needed|编辑|來源請求|来源请求)\]")
_POLICY = re.compile(
    r"terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies"
    r"|使用条款|服务条款|隐私政策|隐私权政策|隱私權政策|版权所有|cookie ?政策|使用 ?cookie",
    re.IGNORECASE,
)
_POLICY_KEYWORDS = ("javascript", "cookie", "terms of use", "privacy policy", "条款", "政策", "版权所有")


@register("filter", "c4_quality")
def c4_quality(document: Document) -> FilterResult:
    """Keep the lines of a web page that read like sentences (Raffel et al. 2020, https://arxiv.org/abs/1910.10683).

    The same as published: a line stays if it ends in ``. ? ! " '`` and not in an ellipsis, has at least three words,
    none longer than 1,000 characters, and speaks neither of JavaScript nor of cookies, privacy policy and terms of
    use; a page goes if it has ``lorem ipsum``, a curly bracket, or fewer than five sentences left.

    Different: sentences are counted by their end marks; the list of bad words is not here.

    Chinese: a line may also end in 。？！；：」』）… and needs five characters; three sentences are
    enough, because a Chinese sentence runs on over several clauses; the phrases of policies are there in Chinese.
    Meant for web text: headings, lists and tables go, and so do formulas. Other scripts and code are not judged.
    """
    kind = classify_text(document)
    if kind not in ("zh", "en"):
        return KEEP
    text, is_zh = document.content, kind == "zh"
    lowered = text.lower()
    if "lorem ipsum" in lowered:
        return Drop("lorem ipsum")
    if "{" in text:
        return Drop("curly bracket")
    ends = _END_OF_LINE_ZH if is_zh else _END_OF_LINE
    may_have_policy_text = any(sign in lowered for sign in _POLICY_KEYWORDS)  # rare, so lines are not checked otherwise
    kept: list[str] = []
    for line in map(str.strip, text.split("\n")):
        if "[" in line:
            line = _CITATION.sub("", line).rstrip()
        if not line.endswith(ends) or line.endswith("..."):
            continue
        is_short = len(line) < 5 if is_zh else len(line.split()) < 3
        if may_have_policy_text and _has_policy_text(line):
            continue
        if not is_short and not _has_long_word(line, 1000):
            kept.append(line)
    body = "\n".join(kept)
    sentences = len((_SENTENCE_END_ZH if is_zh else _SENTENCE_END).findall(body))
    if sentences < (3 if is_zh else 5):
        return Drop("too few sentences")
    return KEEP if body == text else Change(body, "lines that are no sentences")


def _has_policy_text(line: str) -> bool:
    return "javascript" in line.lower() or _POLICY.search(line) is not None


def _has_long_word(line: str, limit: int) -> bool:
    # Chinese has no spaces: there a word is only what ASCII characters make.
    if len(line) <= limit:
        return False
    return any(len(word) - count_han(word) > limit for word in line.split())


_STOP_CHARS = (".", "'", '"', "!", "?", "”", "’")
_STOP_CHARS_ZH = (*_STOP_CHARS, "。", "！", "？", "；", "：", "，", "」", "』", "）", "…", "》")


@register("filter", "fineweb_quality")
def fineweb_quality(document: Document) -> FilterResult:
    """Drop pages that are lists or menus (Penedo et al. 2024, https://arxiv.org/abs/2406.17557).

    The same as published: more than 12% of lines end in punctuation; fewer than 67% are of 30 characters or less;
    less than 1% of characters are in repeated lines; at most 0.3 line ends a word.

    Different: blank lines are no lines and their line ends do not count, so that Markdown with a blank line between
    paragraphs is judged like text without; words are what white space separates.

    Chinese: Chinese punctuation counts, the comma included, because verse and classical prose break lines at it;
    a line of 10 characters is short; 10.6% and 0.178 line ends a word are FineWeb-2's for ``cmn_Hani``, the latter
    0.11 a character. Other scripts and code are not judged.
    """
    kind = classify_text(document)
    if kind not in ("zh", "en"):
        return KEEP
    is_zh = kind == "zh"
    lines = [stripped for line in document.content.split("\n") if (stripped := line.strip())]
    if not lines:
        return Drop("no lines")
    punctuated = sum(line.endswith(_STOP_CHARS_ZH if is_zh else _STOP_CHARS) for line in lines)
    if punctuated <= (0.106 if is_zh else 0.12) * len(lines):
        return Drop("too few lines end in punctuation")
    if sum(len(line) <= (10 if is_zh else 30) for line in lines) >= 0.67 * len(lines):
        return Drop("too many short lines")
    chars = sum(map(len, lines))
    repeated = chars - sum(map(len, set(lines)))
    if repeated >= 0.01 * chars:
        return Drop("characters in repeated lines")
    units = chars if is_zh else len(document.content.split())
    if len(lines) - 1 > (0.11 if is_zh else 0.3) * units:
        return Drop("too many line ends")
    return KEEP
