"""Worst-case inputs for every regular expression in ``src``, made from the pattern itself.

    python -m tests.adversarial.pattern_attack          # the table of the slowest, and what grows faster than its input

For each repetition of a pattern: what precedes it, its body many times, and an end that does not match; and each
beginning of the pattern many times, which makes a search start again at every place. Few of these are followed to large
sizes: time that grows faster than the input is seen in a few thousand characters, exponential time in tens.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from re import _constants as sre
from re import _parser as sre_parser
from typing import Any

import zero2all

SMALL_SIZES = (312, 1_250, 5_000)  # all inputs at the second, the slowest of them at the third
SIZES = (20_000, 80_000, 320_000)  # what follows, also four times as large each
GATE_SIZES = SIZES[:2]
FEW_UNITS = (3, 4, 6, 9, 13, 20, 30, 45)  # repetitions in which exponential time shows, before it becomes hours
MIN_EXPONENTIAL = 0.005  # seconds, for tens of characters
MAX_EXPONENTIAL_GROWTH = 20.0  # by half as many repetitions again: a seventh power is 17
MAX_SECONDS = 5.0  # of one call with the largest size, and in proportion
MAX_GROWTH = 8.0  # from one size to the next, which is four times as large: linear is 4, quadratic 16
NOISE = 0.1  # seconds below which growth is not judged
INSTANT = 0.004  # seconds, and growth so far, from which even a cubic part of the time leads to less than the noise
INSTANT_GROWTH = 6.0
FOLLOWED = (12, 3)  # the slowest inputs, which are tried at 5 KB, and of these at all sizes
REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT)
METHODS = ("match", "fullmatch", "search", "sub", "findall", "finditer", "split", "subn")
MAX_VARIANTS = 3  # samples of each part of a pattern
ENDS = ("", "\x00", "\n")

Case = tuple[str, str, str]  # what comes first, what is repeated, how it ends


@dataclass(frozen=True)
class FoundPattern:
    """A pattern in the source, and the methods that are called on it."""

    place: str
    pattern: str | bytes
    flags: int
    methods: tuple[str, ...]


@dataclass(frozen=True)
class Attack:
    """The slowest input of a pattern."""

    place: str
    method: str
    family: str
    seconds: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    """In characters; up to the one at which it was clear."""
    problem: str = ""

    @property
    def is_linear(self) -> bool:
        if self.problem or (self.seconds and self.seconds[-1] > max(NOISE, MAX_SECONDS * self.sizes[-1] / SIZES[-1])):
            return False
        return all(later <= max(NOISE, MAX_GROWTH * earlier) for earlier, later in pairwise(self.seconds))

    @property
    def is_instant(self) -> bool:
        """Whether it is known to be linear at the next size too."""
        earlier, later = self.seconds[-2:]
        return later < INSTANT and later <= INSTANT_GROWTH * earlier

    def at(self, size: int) -> float | None:
        return dict(zip(self.sizes, self.seconds, strict=True)).get(size)


def find_patterns() -> list[FoundPattern]:
    """Compiled patterns of all modules, and those written where they are used."""
    found: dict[tuple[str | bytes, int], FoundPattern] = {}
    for path in sorted(Path(zero2all.__path__[0]).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not any(
            isinstance(node, ast.Import) and any(name.name == "re" for name in node.names) for node in tree.body
        ):
            continue  # some modules are programs, which run when they are imported
        parts = path.relative_to(Path(zero2all.__path__[0]).parent).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        module = importlib.import_module(name)
        for one in [*_compiled(module, name, tree), *_inline(name, tree)]:
            found.setdefault((one.pattern, one.flags), one)
    return list(found.values())


def _compiled(module: Any, name: str, tree: ast.AST) -> Iterator[FoundPattern]:
    used: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in METHODS:
            used.setdefault(node.value.id, set()).add(node.attr)
    for variable, value in vars(module).items():
        for pattern in _patterns_in(value):
            methods = tuple(sorted(used.get(variable, set()))) or ("search",)
            yield FoundPattern(f"{name}.{variable}", pattern.pattern, pattern.flags, methods)


def _patterns_in(value: object, depth: int = 0) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict) and depth < 2:
        for one in value.values():
            yield from _patterns_in(one, depth + 1)
    elif isinstance(value, list | tuple) and depth < 2:
        for one in value:
            yield from _patterns_in(one, depth + 1)


def _inline(name: str, tree: ast.AST) -> Iterator[FoundPattern]:
    """``re.search(r"...", text)`` with a literal."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner, first = node.func.value, node.args[0] if node.args else None
        if not (isinstance(owner, ast.Name) and owner.id == "re" and isinstance(first, ast.Constant)):
            continue
        if isinstance(first.value, str | bytes) and node.func.attr in METHODS:
            flags = re.compile(first.value).flags | (re.MULTILINE if "MULTILINE" in ast.unparse(node) else 0)
            yield FoundPattern(f"{name}:{node.lineno}", first.value, flags, (node.func.attr,))


class Sampler:
    """Strings that parts of a pattern match. Where there is a choice, ``variant`` takes another one."""

    def __init__(self, variant: int, groups: dict[int, str] | None = None) -> None:
        self.variant, self.groups = variant, groups if groups is not None else {}

    def items(self, items: Sequence[tuple[Any, Any]]) -> str:
        return "".join(self.item(operation, argument) for operation, argument in items)

    def item(self, operation: Any, argument: Any) -> str:
        if operation is sre.LITERAL:
            return chr(argument)
        if operation is sre.NOT_LITERAL:
            return next(character for character in "a b<-1" if ord(character) != argument)
        if operation is sre.ANY:
            return "a<b-"[self.variant % 4]
        if operation is sre.IN:
            return self._one_of(argument)
        if operation is sre.BRANCH:
            return self.items(argument[1][self.variant % len(argument[1])])
        if operation is sre.SUBPATTERN:
            self.groups[argument[0] or 0] = text = self.items(argument[3])
            return text
        if operation is sre.ATOMIC_GROUP:
            return self.items(argument)
        if operation in REPEATS:
            low, high, body = argument
            return self.items(body) * max(low, min(1, high))
        if operation is sre.GROUPREF:
            return self.groups.get(argument, "")
        return ""  # an assertion or an anchor matches nothing itself

    def _one_of(self, choices: Sequence[tuple[Any, Any]]) -> str:
        candidates = [" ", "a", "1", "\n", "<", '"', "-", ".", "_", "[", "{", "的", "\x85", "\t", "é", "~", "\x00"]
        negated = choices[0][0] is sre.NEGATE
        wanted = [one for one in candidates if any(_contains(choice, one) for choice in choices) != negated]
        if not negated:
            wanted += [chr(argument if kind is sre.LITERAL else argument[0]) for kind, argument in choices
                       if kind in (sre.LITERAL, sre.RANGE)]  # fmt: skip
        return wanted[self.variant % len(wanted)] if wanted else "a"


def _contains(choice: tuple[Any, Any], character: str) -> bool:
    kind, argument = choice
    if kind is sre.LITERAL:
        return ord(character) == argument
    if kind is sre.RANGE:
        return bool(argument[0] <= ord(character) <= argument[1])
    if kind is sre.CATEGORY:
        name = {
            sre.CATEGORY_SPACE: r"\s", sre.CATEGORY_NOT_SPACE: r"\S", sre.CATEGORY_WORD: r"\w",
            sre.CATEGORY_NOT_WORD: r"\W", sre.CATEGORY_DIGIT: r"\d", sre.CATEGORY_NOT_DIGIT: r"\D",
        }[argument]  # fmt: skip
        return re.fullmatch(name, character) is not None
    return False


def _parse(pattern: str | bytes, flags: int) -> list[tuple[Any, Any]]:
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    return list(sre_parser.parse(text, flags & ~(re.UNICODE if isinstance(pattern, bytes) else 0)))


def _has_nested_choice(items: Sequence[tuple[Any, Any]], repeated: bool = False) -> bool:
    """Whether a repetition holds a repetition or a branch. Without one, a pattern takes polynomial time."""
    for operation, argument in items:
        is_repeat = operation in REPEATS
        if repeated and (is_repeat or operation is sre.BRANCH):
            return True
        if any(_has_nested_choice(part, repeated or (is_repeat and argument[1] > 1))
               for part in _parts(operation, argument)):  # fmt: skip
            return True
    return False


def _parts(operation: Any, argument: Any) -> list[Sequence[tuple[Any, Any]]]:
    """What an item of a pattern is made of."""
    if operation in REPEATS:
        return [argument[2]]
    if operation is sre.SUBPATTERN:
        return [argument[3]]
    if operation is sre.ATOMIC_GROUP:
        return [argument]
    if operation in (sre.ASSERT, sre.ASSERT_NOT):
        return [argument[1]]
    if operation is sre.BRANCH:
        return list(argument[1])
    if operation is sre.GROUPREF_EXISTS:
        return [part for part in argument[1:] if part]
    return []


def inputs(parsed: Sequence[tuple[Any, Any]]) -> list[Case]:
    """Without duplicates."""
    cases: dict[Case, None] = {}
    for variant in range(MAX_VARIANTS):
        for prefix, body, ends in _repeats(parsed, "", variant):
            units = [one for one in (body, prefix + body) if one]
            cases |= dict.fromkeys((prefix, unit + more, end) for unit in units for end in ends for more in ("", "\n"))
    return list(cases)


def _repeats(items: Sequence[tuple[Any, Any]], before: str, variant: int) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Each repetition with what precedes it, and each beginning of the pattern as something to repeat; with ends."""
    sampler = Sampler(variant)
    for operation, argument in items:
        if operation in REPEATS and argument[1] > 1:
            yield before, Sampler(variant).items(argument[2]), ENDS
            yield before, Sampler(variant + 1).items(argument[2]), ENDS
        for part in _parts(operation, argument):
            yield from _repeats(part, before, variant)
        before += sampler.item(operation, argument)
        yield "", before, ENDS[1:2]  # a search starts again at each of them, however the text ends


@dataclass(frozen=True)
class Target:
    """A pattern with one method and one input."""

    found: FoundPattern
    compiled: re.Pattern[Any]
    method: str
    case: Case

    def seconds(self, size: int) -> float:
        return self._seconds(size // len(self.case[1]))

    def follow(self, sizes: Sequence[int]) -> Attack:
        """Up to the size at which it is clear."""
        done = self._attack((), ())
        for number, size in enumerate(sizes):
            tried = sizes[: number + 1]
            done = self._attack((*done.seconds, self.seconds(size)), tried)
            if not done.is_linear:  # or the machine was busy at one of the sizes: all are timed again
                done = self._attack(tuple(map(min, done.seconds, map(self.seconds, tried))), tried)
            is_enough = size >= SIZES[0] and number == len(sizes) - 2 and done.is_instant
            if is_enough or (number and not done.is_linear):  # at two sizes, so that its growth is known
                break
        return done

    def exponential(self) -> Attack | None:
        before = self._seconds(FEW_UNITS[0])
        for number, units in enumerate(FEW_UNITS[1:], 1):
            taken = self._seconds(units)
            if taken > MIN_EXPONENTIAL and min(taken, self._seconds(units)) > max(
                MIN_EXPONENTIAL, MAX_EXPONENTIAL_GROWTH * before
            ):
                sizes = tuple(len(self.case[1]) * some for some in FEW_UNITS[number - 1 : number + 1])
                return self._attack((before, taken), sizes, "exponential")
            before = taken
        return None

    def _attack(self, seconds: tuple[float, ...], sizes: Sequence[int], problem: str = "") -> Attack:
        return Attack(self.found.place, self.method, repr(self.case), seconds, tuple(sizes), problem)

    def _seconds(self, units: int) -> float:
        before, unit, end = self.case
        text: Any = before + unit * units + end
        if isinstance(self.compiled.pattern, bytes):
            text = text.encode("latin-1", "replace")
        begin = time.thread_time()  # other threads of the process may compute too
        if self.method in ("sub", "subn"):
            getattr(self.compiled, self.method)(lambda _: text[:0], text)
        elif self.method == "finditer":
            for _ in self.compiled.finditer(text):
                pass
        else:
            getattr(self.compiled, self.method)(text)
        return time.thread_time() - begin


def attack(found: FoundPattern, sizes: tuple[int, ...] = SIZES) -> Attack:
    """The slowest input of a pattern, or the first that is not linear."""
    compiled = re.compile(found.pattern, found.flags)
    parsed = _parse(found.pattern, found.flags)
    cases, may_be_exponential = inputs(parsed), _has_nested_choice(parsed)
    targets = [Target(found, compiled, method, case) for method in found.methods for case in cases]
    timed: list[tuple[float, Target]] = []
    for target in targets:
        if may_be_exponential and (one := target.exponential()):
            return one
        timed.append((target.seconds(SMALL_SIZES[1]), target))
        if timed[-1][0] > NOISE and not (one := target.follow(SMALL_SIZES[:2])).is_linear:
            return one
    worst = Attack(found.place, found.methods[0], "")
    for count, more in zip(FOLLOWED, (SMALL_SIZES, (SMALL_SIZES[-1], *sizes)), strict=True):
        slowest = [target for _, target in sorted(timed, key=lambda entry: -entry[0])[:count]]
        timed = []
        for target in slowest:
            one = target.follow(more)
            if not one.is_linear:
                return one
            worst = max(worst, one, key=lambda one: (one.sizes[-1:], one.seconds[-1:]))
            timed.append((one.seconds[-1], target))
    return worst


def attack_all(
    patterns: Sequence[FoundPattern], seconds: float = 30.0, sizes: tuple[int, ...] = SIZES
) -> Iterator[Attack]:
    """In another process, which is killed where a call does not end: a running match cannot be interrupted.

    The process takes one pattern after the other, as a fork of a process with torch in it takes longer than a pattern.
    """
    context = get_context("fork")
    done = 0
    while done < len(patterns):
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=_send_attacks, args=(send, patterns[done:], sizes))
        child.start()
        send.close()
        try:
            for found in patterns[done:]:
                result = receive.recv() if receive.poll(seconds) else None
                done += 1
                yield result or Attack(found.place, found.methods[0], "", problem=f"not done in {seconds:.0f} s")
                if result is None:
                    break
        finally:
            child.kill()
            child.join()
            receive.close()


def _send_attacks(send: Connection, patterns: Sequence[FoundPattern], sizes: tuple[int, ...]) -> None:
    for found in patterns:
        send.send(attack(found, sizes))


def table(attacks: Sequence[Attack], rows: int = 5) -> str:
    lines = [
        "| pattern | method | " + " | ".join(f"{size // 1000} KB" for size in SIZES) + " | growth |",
        "|---|---|" + "--:|" * (len(SIZES) + 1),
    ]
    for one in sorted(attacks, key=lambda one: (one.is_linear, one.sizes[-1:] < SIZES[-1:], -sum(one.seconds)))[:rows]:
        times = ["" if (taken := one.at(size)) is None else f"{taken:.4f} s" for size in SIZES]
        growth = [f"{later / earlier:.1f}" for earlier, later in pairwise(one.seconds[-len(SIZES) :])]
        lines.append(f"| {one.place} | {one.method} | {' | '.join(times)} | {', '.join(growth)} |")
    return "\n".join(lines)


def main() -> None:
    patterns = find_patterns()
    attacks: list[Attack] = []
    begin = time.perf_counter()
    for one in attack_all(patterns):
        attacks.append(one)
        if len(attacks) % 10 == 0 or not one.is_linear:
            taken = time.perf_counter() - begin
            sys.stderr.write(f"{len(attacks)} of {len(patterns)} patterns, {taken:.0f} s, now {one.place}\n")
    sys.stdout.write(f"{len(attacks)} patterns\n{table(attacks)}\n")
    slow = [one for one in attacks if not one.is_linear]
    for one in slow:
        sys.stdout.write(f"NOT LINEAR {one}\n")
    sys.exit(bool(slow))


if __name__ == "__main__":
    main()
