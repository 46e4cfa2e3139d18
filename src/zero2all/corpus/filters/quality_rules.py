"""The published rules of Gopher, C4 and FineWeb for web text, with thresholds in characters for Chinese."""

from __future__ import annotations

import re
from itertools import filterfalse, islice

import numpy as np

from zero2all.corpus.document import Document
from zero2all.corpus.filters.filter_registry import KEEP, Change, Drop, FilterResult, register_filter
from zero2all.corpus.filters.text_kinds import (
    classify_text,
    code_points,
    count_han,
    extract_prose,
    letter_mask,
    split_words,
)

_ENGLISH_STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
# Words of FineWeb-2's list for cmn_Hani, and the most frequent ones of classical prose, which has no 的.
_CHINESE_STOP_WORDS = re.compile("[的年在月是和日了於為有被人中为他與後也而由之不以其于者与则則我你]")
_BULLETS = ("•", "‣", "●", "○", "■", "◆")
_ELLIPSES = ("...", "…", "。。。")
_LETTER = re.compile(r"[^\W\d_]")
_WORD_CHAR = re.compile(r"\w")


@register_filter("gopher_quality")
def gopher_quality(
    document: Document,
    *,
    min_words: int = 50,
    max_words: int = 100_000,
    min_word_length: float = 3,
    max_word_length: float = 10,
    max_symbol_ratio: float = 0.1,
    max_bullet_lines: float = 0.9,
    max_ellipsis_lines: float = 0.3,
    min_alpha_words: float = 0.8,
    min_stop_words: int = 2,
    min_chars_zh: int = 80,
    max_chars_zh: int = 160_000,
    min_alpha_chars_zh: float = 0.6,
    stop_words_from_chars_zh: int = 200,
) -> FilterResult:
    """Drop what does not look like running text (Rae et al. 2021, https://arxiv.org/abs/2112.11446).

    The same as published: 50 to 100,000 words; mean word length 3 to 10; hash signs and ellipses each at most a tenth
    of the words; at most 90 % of lines starting with a bullet and 30 % ending with an ellipsis; a letter in 80 % of
    the words; two of the eight stop words.

    Different: words are what white space separates, and signs standing alone are not words; blank lines are not
    lines; listings, formulas, comments and addresses of links are not looked at; hash signs that start a line are
    Markdown headings and are not counted. A limit of 0 is no limit.

    Chinese: lengths are in letters, Han included (50 words are some 80); word length is not looked at; letters are
    60 % of what is not white space (FineWeb-2 asks 73.5 % of words, but punctuation is no word); stop words are asked
    of text from 200 letters on, because a poem may have none. Other scripts and code are not judged.
    """
    kind = classify_text(document)
    if kind not in ("zh", "en"):
        return KEEP
    text = extract_prose(document.content)
    if kind == "en":
        words = split_words(text)
        count = len(words)
        reason = _english_length_reason(words, min_words, max_words, min_word_length, max_word_length, min_alpha_words)
        few_stop_words = _lacks_english_stop_words(words, min_stop_words)
    else:
        count = int(np.count_nonzero(letter_mask(code_points(text))))
        reason = _chinese_length_reason(text, count, min_chars_zh, max_chars_zh, min_alpha_chars_zh)
        few_stop_words = count >= stop_words_from_chars_zh and _lacks_chinese_stop_words(text, min_stop_words)
    reason = reason or _symbol_reason(text, max_symbol_ratio * count, max_bullet_lines, max_ellipsis_lines)
    if not reason and few_stop_words:
        reason = "no stop words"
    return Drop(reason) if reason else KEEP


def _english_length_reason(
    words: list[str], min_words: int, max_words: int, min_length: float, max_length: float, min_alpha: float
) -> str:
    non_alphabetic = list(filterfalse(str.isalpha, words))
    signs = [word for word in non_alphabetic if not (word[0].isalnum() or _WORD_CHAR.search(word))]
    count = len(words) - len(signs)
    if count < max(1, min_words):
        return "too few words"
    if max_words and count > max_words:
        return "too many words"
    mean = (sum(map(len, words)) - sum(map(len, signs))) / count
    if mean < min_length or (max_length and mean > max_length):
        return "word length"
    without_letter = sum(not (word[0].isalpha() or _LETTER.search(word)) for word in non_alphabetic) - len(signs)
    return "too few words with letters" if count - without_letter < min_alpha * count else ""


def _chinese_length_reason(text: str, letters: int, min_chars: int, max_chars: int, min_alpha: float) -> str:
    if letters < max(1, min_chars):
        return "too few characters"
    if max_chars and letters > max_chars:
        return "too many characters"
    return "too few letters" if letters < min_alpha * sum(map(len, text.split())) else ""


def _symbol_reason(text: str, max_symbols: float, max_bullet_lines: float, max_ellipsis_lines: float) -> str:
    if text.count("#") > max_symbols and _hashes_in_lines(text) > max_symbols:
        return "too many hash signs"
    ellipses = text.count("...") + text.count("…") + text.count("。。。")
    if ellipses > max_symbols:
        return "too many ellipses"
    lines = [stripped for line in text.split("\n") if (stripped := line.strip())]
    if sum(line.startswith(_BULLETS) for line in lines) > max_bullet_lines * len(lines):
        return "too many bullets"
    if ellipses and sum(line.endswith(_ELLIPSES) for line in lines) > max_ellipsis_lines * len(lines):
        return "too many lines ending in an ellipsis"
    return ""


def _hashes_in_lines(text: str) -> int:
    return sum(line.lstrip().lstrip("#").count("#") for line in text.split("\n"))


def _lacks_english_stop_words(words: list[str], wanted: int) -> bool:
    found = 0
    for word in words:  # nearly every text has them among its first words
        found += word.lower() in _ENGLISH_STOP_WORDS
        if found >= wanted:
            return False
    return found < wanted


def _lacks_chinese_stop_words(text: str, wanted: int) -> bool:
    return sum(1 for _ in islice(_CHINESE_STOP_WORDS.finditer(text), wanted)) < wanted


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


@register_filter("c4_quality")
def c4_quality(
    document: Document,
    *,
    min_sentences: int = 5,
    min_words_per_line: int = 3,
    max_word_length: int = 1000,
    min_sentences_zh: int = 3,
    min_chars_per_line_zh: int = 5,
    remove_citations: bool = True,
    end_punctuation: bool = True,
    curly_brackets: bool = True,
) -> FilterResult:
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
    if curly_brackets and "{" in text:
        return Drop("curly bracket")
    ends = _END_OF_LINE_ZH if is_zh else _END_OF_LINE
    may_have_policy_text = any(sign in lowered for sign in _POLICY_KEYWORDS)  # rare, so lines are not checked otherwise
    kept: list[str] = []
    for line in map(str.strip, text.split("\n")):
        if remove_citations and "[" in line:
            line = _CITATION.sub("", line).rstrip()
        if end_punctuation and (not line.endswith(ends) or line.endswith("...")):
            continue
        is_short = len(line) < min_chars_per_line_zh if is_zh else len(line.split()) < min_words_per_line
        if may_have_policy_text and _has_policy_text(line):
            continue
        if not is_short and not _has_long_word(line, max_word_length):
            kept.append(line)
    body = "\n".join(kept)
    sentences = len((_SENTENCE_END_ZH if is_zh else _SENTENCE_END).findall(body))
    if sentences < (min_sentences_zh if is_zh else min_sentences):
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


@register_filter("fineweb_quality")
def fineweb_quality(
    document: Document,
    *,
    min_punctuated_lines: float = 0.12,
    max_short_lines: float = 0.67,
    short_line: int = 30,
    max_duplicate_chars: float = 0.01,
    max_newlines_per_word: float = 0.3,
    min_punctuated_lines_zh: float = 0.106,
    short_line_zh: int = 10,
    max_duplicate_chars_zh: float = 0.01,
    max_newlines_per_char_zh: float = 0.11,
) -> FilterResult:
    """Drop pages that are lists or menus (Penedo et al. 2024, https://arxiv.org/abs/2406.17557).

    The same as published: more than 12 % of lines end in punctuation; fewer than 67 % are of 30 characters or less;
    less than 1 % of characters are in repeated lines; at most 0.3 line ends a word.

    Different: blank lines are no lines and their line ends do not count, so that Markdown with a blank line between
    paragraphs is judged like text without; words are what white space separates.

    Chinese: Chinese punctuation counts, the comma included, because verse and classical prose break lines at it;
    a line of 10 characters is short; 10.6 % and 0.178 line ends a word are FineWeb-2's for ``cmn_Hani``, the latter
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
    if punctuated <= (min_punctuated_lines_zh if is_zh else min_punctuated_lines) * len(lines):
        return Drop("too few lines end in punctuation")
    limit = short_line_zh if is_zh else short_line
    if sum(len(line) <= limit for line in lines) >= max_short_lines * len(lines):
        return Drop("too many short lines")
    chars = sum(map(len, lines))
    repeated = chars - sum(map(len, set(lines)))
    if repeated >= (max_duplicate_chars_zh if is_zh else max_duplicate_chars) * chars:
        return Drop("characters in repeated lines")
    units = chars if is_zh else len(document.content.split())
    if len(lines) - 1 > (max_newlines_per_char_zh if is_zh else max_newlines_per_word) * units:
        return Drop("too many line ends")
    return KEEP
