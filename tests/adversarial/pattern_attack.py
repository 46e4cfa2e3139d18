"""Worst-case inputs for every regular expression in ``src``, made from the pattern itself.

    python -m tests.adversarial.pattern_attack          # the table of the slowest, and what grows faster than its input

For each repetition of a pattern: what precedes it, its body many times, and an end that does not match; and each
beginning of the pattern many times, which makes a search start again at every place.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from re import _constants as sre
from re import _parser as sre_parser
from typing import Any

import zero2all

SIZES = (20_000, 80_000, 320_000)
GATE_SIZES = SIZES[:2]  # quadratic time is seen in these too: what takes 5 s at 320 KB takes 0.3 s at 80 KB
FIRST_SIZE = 2_000  # at which all families are tried
MAX_SECONDS = 5.0  # of one call
MAX_GROWTH = 8.0  # from one size to the next, which is four times as large: linear is 4, quadratic 16
NOISE = 0.1  # seconds below which growth is not judged
METHODS = ("match", "fullmatch", "search", "sub", "findall", "finditer", "split", "subn")
MAX_VARIANTS = 3  # samples of each part of a pattern
ENDS = ("", "\x00", "\n")


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
    seconds: tuple[float, ...]
    """By size; shorter where one took too long."""
    sizes: tuple[int, ...] = SIZES

    @property
    def is_linear(self) -> bool:
        # In proportion: time for the largest of all sizes, if it grows no more than linearly from the last one here.
        if len(self.seconds) < len(self.sizes) or self.seconds[-1] > MAX_SECONDS * self.sizes[-1] / SIZES[-1]:
            return False
        pairs = zip(self.seconds, self.seconds[1:], strict=False)
        return all(later <= max(NOISE, MAX_GROWTH * earlier) for earlier, later in pairs)


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
        if operation in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
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


def inputs(pattern: str | bytes, flags: int) -> Iterator[tuple[str, str, str]]:
    """(what comes first, what is repeated, how it ends), without duplicates."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    parsed = sre_parser.parse(text, flags & ~(re.UNICODE if isinstance(pattern, bytes) else 0))
    seen: set[tuple[str, str, str]] = set()
    for variant in range(MAX_VARIANTS):
        for prefix, body in _repeats(list(parsed), "", variant):
            for unit in {body, prefix + body}:
                for end in ENDS:
                    for case in ((prefix, unit, end), (prefix, unit + "\n", end)):
                        if unit and case not in seen:
                            seen.add(case)
                            yield case


def _repeats(items: Sequence[tuple[Any, Any]], before: str, variant: int) -> Iterator[tuple[str, str]]:
    """Each repetition with what precedes it, and each beginning of the pattern as something to repeat."""
    sampler = Sampler(variant)
    for operation, argument in items:
        if operation in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            yield before, Sampler(variant).items(argument[2])
            yield before, Sampler(variant + 1).items(argument[2])
            yield from _repeats(argument[2], before, variant)
        elif operation is sre.SUBPATTERN:
            yield from _repeats(argument[3], before, variant)
        elif operation is sre.ATOMIC_GROUP:
            yield from _repeats(argument, before, variant)
        elif operation is sre.BRANCH:
            for branch in argument[1]:
                yield from _repeats(branch, before, variant)
        before += sampler.item(operation, argument)
        yield "", before


def attack(found: FoundPattern, sizes: tuple[int, ...] = SIZES) -> Attack:
    """The slowest input of a pattern: every family at the smallest size, the worst three at all sizes."""
    compiled = re.compile(found.pattern, found.flags)
    cases = list(inputs(found.pattern, found.flags))
    first: list[tuple[float, str, tuple[str, str, str]]] = []
    for method in found.methods:
        first += [(_seconds(compiled, method, case, FIRST_SIZE), method, case) for case in cases]
    first.sort(key=lambda entry: -entry[0])
    worst = Attack(found.place, found.methods[0], "", (0.0,) * len(sizes), sizes)
    for _, method, case in first[:3]:
        seconds: list[float] = []
        for size in sizes:
            seconds.append(_seconds(compiled, method, case, size))
            if seconds[-1] > MAX_SECONDS:
                break
        attacked = Attack(found.place, method, repr(case), tuple(seconds), sizes)
        if (attacked.is_linear, -seconds[-1]) < (worst.is_linear, -worst.seconds[-1]):
            worst = attacked
    return worst


def _seconds(compiled: re.Pattern[Any], method: str, case: tuple[str, str, str], size: int) -> float:
    before, unit, end = case
    text: Any = before + unit * (size // len(unit)) + end
    if isinstance(compiled.pattern, bytes):
        text = text.encode("latin-1", "replace")
    begin = time.process_time()
    if method in ("sub", "subn"):
        getattr(compiled, method)(lambda _: text[:0], text)
    elif method == "finditer":
        for _ in compiled.finditer(text):
            pass
    else:
        getattr(compiled, method)(text)
    return time.process_time() - begin


def attack_in_time(found: FoundPattern, seconds: float = 30.0, sizes: tuple[int, ...] = SIZES) -> Attack:
    """In another process, which is killed if a call does not end: a running match cannot be interrupted."""
    context = get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=lambda: send.send(attack(found, sizes)))
    child.start()
    try:
        if receive.poll(seconds):
            result: Attack = receive.recv()
            return result
        return Attack(found.place, found.methods[0], f"not done in {seconds:.0f} s", (), sizes)
    finally:
        child.kill()
        child.join()


def table(attacks: Sequence[Attack], rows: int = 5) -> str:
    lines = [
        "| pattern | method | " + " | ".join(f"{size // 1000} KB" for size in SIZES) + " |",
        "|---|---|---|---|---|",
    ]
    for one in sorted(attacks, key=lambda one: -(one.seconds[-1] if one.is_linear else 1e9))[:rows]:
        times = [f"{value:.4f} s" for value in one.seconds]
        lines.append(f"| {one.place} | {one.method} | {' | '.join(times)} |")
    return "\n".join(lines)


def main() -> None:
    patterns = find_patterns()
    attacks = []
    for found in patterns:
        begin = time.perf_counter()
        attacks.append(attack_in_time(found))
        sys.stderr.write(f"{time.perf_counter() - begin:.1f} s {found.place}\n")
    sys.stdout.write(f"{len(attacks)} patterns\n{table(attacks)}\n")
    for one in attacks:
        if not one.is_linear:
            sys.stdout.write(f"NOT LINEAR {one}\n")


if __name__ == "__main__":
    main()
