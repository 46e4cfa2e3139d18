"""Compiled: where the words of a text end, the same as the encoder's regular expressions say.

A regular expression engine spends most of counting; these few rules of each pattern run at memory speed. What is a
letter, a number or a blank is asked of the encoder itself (``character_classes``), so both know the same Unicode.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero2all.tokenizer.compiled import compiled, inlined

LETTER, NUMBER, BLANK, NEWLINE, HAN = 1, 2, 4, 8, 16
PLANES = 0x40000  # letters, numbers and blanks are all below; what is above is a mark to every pattern
GPT2, QWEN = 0, 1

QUOTE, SPACE, CR, LF = 0x27, 0x20, 0x0D, 0x0A
LONG_S = 0x17F  # an s to a pattern that ignores case


def character_classes() -> NDArray[np.uint8]:
    """For each code point the classes that the encoder's regular expressions put it in; takes a second."""
    from tokenizers import Regex, pre_tokenizers

    code_points = [*range(0xD800), *range(0xE000, PLANES)]
    text = "".join(map(chr, code_points))
    place = np.array(code_points)
    classes = np.zeros(PLANES, np.uint8)
    for flag, pattern in ((LETTER, r"\p{L}+"), (NUMBER, r"\p{N}+"), (BLANK, r"\s+"), (HAN, r"\p{Han}+")):
        inside = np.ones(len(text), bool)
        for _, (start, end) in pre_tokenizers.Split(Regex(pattern), "removed").pre_tokenize_str(text):
            inside[start:end] = False
        classes[place[inside]] |= flag
    classes[[ord("\r"), ord("\n")]] |= NEWLINE
    classes[classes & LETTER == 0] &= ~np.uint8(HAN)  # radicals and the like are marks to every pattern
    return classes


@inlined
def character(data: NDArray[np.uint8], at: int, end: int) -> tuple[int, int]:
    """The code point at a place and where the next one begins. A broken byte is a character of its own."""
    first = int(data[at])
    if first < 0x80:
        return first, at + 1
    size = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
    if first < 0xC0 or at + size > end:
        return PLANES, at + 1
    code = first & (0x7F >> size)
    for offset in range(1, size):
        code = code << 6 | int(data[at + offset]) & 0x3F
    return code, at + size


@inlined
def class_of(code: int, classes: NDArray[np.uint8]) -> int:
    return int(classes[code]) if code < PLANES else 0


@inlined
def run_end(data: NDArray[np.uint8], at: int, end: int, classes: NDArray[np.uint8], flag: int, most: int) -> int:
    """Where a run of characters of one class (0: of none) ends, after ``most`` of them at the latest."""
    while at < end and most > 0:
        code, after = character(data, at, end)
        kind = class_of(code, classes) & (LETTER | NUMBER | BLANK | NEWLINE)
        if (kind & flag == 0) if flag else (kind != 0):
            break
        at = after
        most -= 1
    return at


@compiled
def contraction_end(data: NDArray[np.uint8], at: int, end: int, any_case: bool) -> int:
    """The end of 's 't 're 've 'm 'll 'd, or ``at`` where there is none."""
    first, after = character(data, at + 1, end) if at + 1 < end else (0, at)
    second = int(data[after]) if after < end else 0
    if any_case:
        first = first | 0x20 if first < 0x80 else 0x73 if first == LONG_S else first
        second |= 0x20
    if first == 0x73 or first == 0x74 or first == 0x6D or first == 0x64:  # s t m d
        return after
    # re ve ll
    pair = (
        (first == 0x72 and second == 0x65) or (first == 0x76 and second == 0x65) or (first == 0x6C and second == 0x6C)
    )
    return after + 1 if pair else at


@compiled
def blanks_end(data: NDArray[np.uint8], at: int, end: int, classes: NDArray[np.uint8], keep_newlines: bool) -> int:
    """``\\s*[\\r\\n]+`` if asked for, else ``\\s+(?!\\S)``, else ``\\s+``."""
    last, newline, here = at, -1, at
    while here < end:
        code, after = character(data, here, end)
        kind = class_of(code, classes)
        if kind & BLANK == 0:
            break
        if kind & NEWLINE:
            newline = after
        last, here = here, after
    if keep_newlines and newline >= 0:
        return newline
    return here if here == end or last == at else last


@inlined
def word_end(data: NDArray[np.uint8], at: int, end: int, classes: NDArray[np.uint8], family: int, digits: int) -> int:
    """Where the word that begins at ``at`` ends."""
    code, after = character(data, at, end)
    kind = class_of(code, classes)
    if code == QUOTE:
        contracted = contraction_end(data, at, end, family == QWEN)
        if contracted > at:
            return contracted
    following = class_of(character(data, after, end)[0], classes) if after < end else 0
    joins = code == SPACE if family == GPT2 else kind & (NUMBER | NEWLINE) == 0
    most = end
    if kind & LETTER or (joins and following & LETTER):
        run = LETTER
    elif kind & NUMBER:
        run, most = NUMBER, digits - 1
    elif family == GPT2 and code == SPACE and following & NUMBER:
        run = NUMBER
    elif kind == 0 or (code == SPACE and after < end and following & (LETTER | NUMBER | BLANK) == 0):
        run = 0
    else:
        return blanks_end(data, at, end, classes, family == QWEN)
    at = run_end(data, after, end, classes, run, most)
    if run == 0 and family == QWEN:
        while at < end and (data[at] == CR or data[at] == LF):
            at += 1
    return at


@inlined
def chop_end(data: NDArray[np.uint8], at: int, end: int, classes: NDArray[np.uint8], chop: int) -> int:
    """Where a word is cut when Han runs may have only ``chop`` characters; ``end`` if it is not."""
    han = 0
    while at < end:
        code, after = character(data, at, end)
        if class_of(code, classes) & HAN:
            if han == chop:
                return at
            han += 1
        else:
            han = 0
        at = after
    return end


RULES: dict[str, tuple[int, int]] = {
    "zh-en-code": (QWEN, 3),
    "qwen2": (QWEN, 1),
    "gpt2": (GPT2, 1 << 30),
}
"""For each of ``PATTERNS``: its family of rules, and how many digits go together."""


def cut(text: str, pattern: str, classes: NDArray[np.uint8], chop: int = 0) -> list[str]:
    """The words of one text, for tests and for looking.

    >>> cut("It's 12345", "zh-en-code", character_classes())
    ['It', "'s", ' ', '123', '45']
    """
    data = np.frombuffer(text.encode(), np.uint8)
    words: list[Any] = []
    at = 0
    while at < data.size:
        end = word_end(data, at, data.size, classes, *RULES[pattern])
        while at < end:
            piece = chop_end(data, at, end, classes, chop) if chop else end
            words.append(data[at:piece].tobytes().decode())
            at = piece
    return words
