"""Check a pre-tokenizer pattern before it is used: it must lose no text, and split any text in linear time.

Both are tried in a child process with a limit of CPU time, on the engine that encodes. Whether a pattern backtracks
cannot be seen without its engine, which rewrites patterns. So it is measured: on each of many texts that repeat one or
two characters and then end differently, time must grow with the length, and not with its square.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import tokenizers
from tokenizers import pre_tokenizers

from zero2all.base.errors import UsageError
from zero2all.base.processes import end_with_parent
from zero2all.tokenizer.backends import TRICKY_TEXTS

MAX_PATTERN_CHARACTERS = 4096
CPU_SECONDS = 30
MEMORY_BYTES = 4 << 30
WALL_SECONDS = 600  # the process may be stopped, or the machine busy
# One of each class that patterns tell apart.
REPRESENTATIVES = "aAǅʰ春e\u03011Ⅷ½ \t\n\r\u00a0\u3000'’.,_/-$\U0001f600\x00"
MAX_OWN_CHARACTERS = 16  # of the pattern itself
SHORT, LONG = 60, 1000  # characters that are repeated
CONFIRM = 8000  # where a square is so much more that no noise looks like it


def check_pattern(pattern: str) -> None:
    """Raise ``UsageError`` with the reason if text cannot be split by this regular expression."""
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise UsageError(f"the pattern has {len(pattern)} characters: use at most {MAX_PATTERN_CHARACTERS}")
    command = [sys.executable, "-m", "zero2all.tokenizer.pattern_check", str(os.getpid())]
    try:
        done = subprocess.run(command, input=json.dumps(pattern), capture_output=True, text=True, timeout=WALL_SECONDS)
    except subprocess.TimeoutExpired:
        raise UsageError(f"the pattern {pattern!r} was not checked within {WALL_SECONDS} s: simplify it") from None
    if done.returncode:  # killed by the limit, or the engine crashed
        raise UsageError(f"the pattern {pattern!r} needed more than {CPU_SECONDS} s or too much memory: simplify it")
    if problem := json.loads(done.stdout.splitlines()[-1]):
        raise UsageError(f"the pattern {pattern!r} cannot be used: {problem}")


def find_problem(pattern: str) -> str | None:
    """Why a pattern cannot be used. May take long or not return: for a process that can be killed."""
    try:
        find_gaps = pre_tokenizers.Split(tokenizers.Regex(pattern), "removed").pre_tokenize_str
    except Exception as error:
        return f"it is not a regular expression ({error})"
    try:
        return find_backtracking(find_gaps, pattern) or find_unmatched(find_gaps)
    except BaseException as error:  # a Rust panic: the engine has a limit too
        if type(error).__name__ != "PanicException":
            raise
        return f"it backtracks too far ({error}): no quantifier may be inside another, such as (a+)+"


def find_unmatched(find_gaps: Callable[[str], list[tuple[str, tuple[int, int]]]]) -> str | None:
    """The first character that no alternative matches: some encoders would drop it."""
    rng = random.Random(0)
    planes = [*range(0xD800), *range(0xE000, 0x110000, 3)]
    texts = [*TRICKY_TEXTS, "".join(map(chr, planes)), "\n".join(map(chr, planes))]
    texts += ["".join(rng.choices(REPRESENTATIVES, k=30)) for _ in range(2000)]
    texts += ["".join(chr(rng.choice(planes)) for _ in range(20)) for _ in range(500)]
    for text in texts:
        if gaps := find_gaps(text):
            character = gaps[0][0][0]
            return (
                f"it does not match U+{ord(character):04X} {character!r} in {text[:20]!r}: "
                r"add an alternative for everything else at its end, such as |[\s\S]"
            )
    return None


def find_backtracking(find_gaps: Callable[[str], object], pattern: str) -> str | None:
    """A text whose splitting takes more than linear time."""
    own = dict.fromkeys(re.sub(r"\\.|[(){}?*+|\[\]]", "", pattern))
    characters = "".join(dict.fromkeys([*list(own)[:MAX_OWN_CHARACTERS], *REPRESENTATIVES]))
    for repeated, end in _attacks(pattern, characters):
        short, long = (_seconds(find_gaps, repeated, end, length) for length in (SHORT, LONG))
        if long < 40 * short:  # 17 times the length
            continue
        short = min(_seconds(find_gaps, repeated, end, SHORT) for _ in range(3)) / SHORT
        if any(_is_slow(find_gaps, repeated, end, length, short) for length in (LONG, CONFIRM)):
            where = f" before {end[0]!r}" if end else ""
            return (
                f"splitting {repeated!r} repeated n times{where} takes more than linear time: two quantifiers "
                "in sequence must not match the same characters, and what an alternative matches before it fails "
                "must be matched at once by a later one"
            )
    return None


def _attacks(pattern: str, characters: str) -> Iterator[tuple[str, str]]:
    """What is repeated, and what follows it. All characters follow last, or the engine would see that a character it
    needs is missing and not even try."""
    words = re.findall(r"\w{2,}", pattern)
    for repeated in (*characters, *words):
        for end in characters:
            yield repeated, f"{end}\n{characters}"
        yield repeated, ""
    for first in characters:
        for second in characters:
            if first != second:
                yield first + second, f"\ufffd\n{characters}"


def _is_slow(find_gaps: Callable[[str], object], repeated: str, end: str, length: int, short: float) -> bool:
    """Whether a character costs many times as much as in a short text, whenever it is measured."""
    most = 64 if length < CONFIRM else 16  # of a square it is the ratio of the lengths
    return all(_seconds(find_gaps, repeated, end, length) / length > most * short for _ in range(3))


def _seconds(find_gaps: Callable[[str], object], repeated: str, end: str, length: int) -> float:
    text = repeated * (length // len(repeated)) + end
    start = time.thread_time()
    find_gaps(text)
    return time.thread_time() - start


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    with suppress(ValueError, OSError):  # macOS does not limit it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.stdout.write(json.dumps(find_problem(json.load(sys.stdin))) + "\n")


if __name__ == "__main__":
    main()
