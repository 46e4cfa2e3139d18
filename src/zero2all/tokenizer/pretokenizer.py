"""JIT kernels that split text into words exactly as the encoder's regular expressions do.

A regular expression engine would dominate counting; these few rules of each pattern run at memory speed. Which
characters are letters, numbers or whitespace is taken from the encoder itself (``character_classes``), so both use the
same Unicode version.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zero2all.tokenizer.jit import jit, jit_inline

LETTER, NUMBER, WHITESPACE, NEWLINE, HAN = 1, 2, 4, 8, 16
NUM_CODE_POINTS = 0x40000  # letters, numbers and whitespace are all below; the rest is punctuation to every pattern
GPT2, QWEN, WHOLE = 0, 1, 2  # rule families; WHOLE: the text is one word, which a regular expression has split off

QUOTE, SPACE, CR, LF = 0x27, 0x20, 0x0D, 0x0A
LONG_S = 0x17F  # an s to a pattern that ignores case


def character_classes() -> NDArray[np.uint8]:
    """The character classes of each code point in the encoder's regular expressions; takes a second."""
    from tokenizers import Regex, pre_tokenizers

    code_points = [*range(0xD800), *range(0xE000, NUM_CODE_POINTS)]
    text = "".join(map(chr, code_points))
    indices = np.array(code_points)
    classes = np.zeros(NUM_CODE_POINTS, np.uint8)
    for flag, pattern in ((LETTER, r"\p{L}+"), (NUMBER, r"\p{N}+"), (WHITESPACE, r"\s+"), (HAN, r"\p{Han}+")):
        inside = np.ones(len(text), bool)
        for _, (start, end) in pre_tokenizers.Split(Regex(pattern), "removed").pre_tokenize_str(text):
            inside[start:end] = False
        classes[indices[inside]] |= flag
    classes[[ord("\r"), ord("\n")]] |= NEWLINE
    classes[classes & LETTER == 0] &= ~np.uint8(HAN)  # radicals and the like are punctuation to every pattern
    return classes


@jit_inline
def decode_char(data: NDArray[np.uint8], pos: int, end: int) -> tuple[int, int]:
    """The code point at ``pos`` and the offset of the next one. An invalid byte counts as one character."""
    first = int(data[pos])
    if first < 0x80:
        return first, pos + 1
    size = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
    if first < 0xC0 or pos + size > end:
        return NUM_CODE_POINTS, pos + 1
    code = first & (0x7F >> size)
    for offset in range(1, size):
        code = code << 6 | int(data[pos + offset]) & 0x3F
    return code, pos + size


@jit_inline
def char_class(code: int, classes: NDArray[np.uint8]) -> int:
    return int(classes[code]) if code < NUM_CODE_POINTS else 0


@jit_inline
def run_end(data: NDArray[np.uint8], pos: int, end: int, classes: NDArray[np.uint8], flag: int, max_chars: int) -> int:
    """End of a run of characters of one class (0: of none), after at most ``max_chars`` of them."""
    while pos < end and max_chars > 0:
        code, after = decode_char(data, pos, end)
        kind = char_class(code, classes) & (LETTER | NUMBER | WHITESPACE | NEWLINE)
        if (kind & flag == 0) if flag else (kind != 0):
            break
        pos = after
        max_chars -= 1
    return pos


@jit
def contraction_end(data: NDArray[np.uint8], pos: int, end: int, any_case: bool) -> int:
    """The end of 's 't 're 've 'm 'll 'd, or ``pos`` where there is none."""
    first, after = decode_char(data, pos + 1, end) if pos + 1 < end else (0, pos)
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
    return after + 1 if pair else pos


@jit
def whitespace_end(data: NDArray[np.uint8], pos: int, end: int, classes: NDArray[np.uint8], keep_newlines: bool) -> int:
    """``\\s*[\\r\\n]+`` if asked for, else ``\\s+(?!\\S)``, else ``\\s+``."""
    last, newline, here = pos, -1, pos
    while here < end:
        code, after = decode_char(data, here, end)
        kind = char_class(code, classes)
        if kind & WHITESPACE == 0:
            break
        if kind & NEWLINE:
            newline = after
        last, here = here, after
    if keep_newlines and newline >= 0:
        return newline
    return here if here == end or last == pos else last


@jit_inline
def word_end(
    data: NDArray[np.uint8], pos: int, end: int, classes: NDArray[np.uint8], family: int, max_digits: int
) -> int:
    """End of the word that begins at ``pos``."""
    if family == WHOLE:
        return end
    code, after = decode_char(data, pos, end)
    kind = char_class(code, classes)
    if code == QUOTE:
        contracted = contraction_end(data, pos, end, family == QWEN)
        if contracted > pos:
            return contracted
    following = char_class(decode_char(data, after, end)[0], classes) if after < end else 0
    joins = code == SPACE if family == GPT2 else kind & (NUMBER | NEWLINE) == 0
    max_chars = end
    if kind & LETTER or (joins and following & LETTER):
        run = LETTER
    elif kind & NUMBER:
        run, max_chars = NUMBER, max_digits - 1
    elif family == GPT2 and code == SPACE and following & NUMBER:
        run = NUMBER
    elif kind == 0 or (code == SPACE and after < end and following & (LETTER | NUMBER | WHITESPACE) == 0):
        run = 0
    else:
        return whitespace_end(data, pos, end, classes, family == QWEN)
    pos = run_end(data, after, end, classes, run, max_chars)
    if run == 0 and family == QWEN:
        while pos < end and (data[pos] == CR or data[pos] == LF):
            pos += 1
    return pos


@jit_inline
def han_split_end(data: NDArray[np.uint8], pos: int, end: int, classes: NDArray[np.uint8], max_han_run: int) -> int:
    """Where a word is split if Han runs may have only ``max_han_run`` characters; ``end`` if it is not."""
    han = 0
    while pos < end:
        code, after = decode_char(data, pos, end)
        if char_class(code, classes) & HAN:
            if han == max_han_run:
                return pos
            han += 1
        else:
            han = 0
        pos = after
    return end


WHOLE_TEXT = (WHOLE, 0)
PATTERN_RULES: dict[str, tuple[int, int]] = {"zh-en-code": (QWEN, 3), "qwen2": (QWEN, 1), "gpt2": (GPT2, 1 << 30)}
"""For each of ``PATTERNS``: its rule family, and the largest number of digits in a word."""
