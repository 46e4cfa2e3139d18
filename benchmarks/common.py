"""What the benchmarks share: arguments, turns, clocks and memory, child processes, output."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

Result = TypeVar("Result")


def benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """``description``: the docstring of the benchmark, printed as it is."""
    return argparse.ArgumentParser(
        prog=sys.argv[0], description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def take_turns(
    contenders: Mapping[str, Callable[[], Result]], rounds: int, warm_up: int = 0, alternate: bool = False
) -> dict[str, list[Result]]:
    """What each contender returns in every round after the warm-up: all see the same machine.

    With ``alternate``, every second round runs backwards.
    """
    found: dict[str, list[Result]] = {name: [] for name in contenders}
    for number in range(-warm_up, rounds):
        for name in list(contenders)[:: -1 if alternate and number % 2 else 1]:
            result = contenders[name]()
            if number >= 0:
                found[name].append(result)
    return found


def median_ratio(values: Iterable[float], references: Iterable[float]) -> float:
    """The median over rounds: two turns of one round meet the same machine, the medians of both may not."""
    return median(value / reference for value, reference in zip(values, references, strict=True))


def cpu_seconds(function: Callable[..., object], *given: Any) -> float:
    """CPU seconds of this process: with one thread, other programs on the machine change them little."""
    begin = time.process_time()
    function(*given)
    return time.process_time() - begin


def wall_seconds(function: Callable[..., object], *given: Any) -> float:
    begin = time.perf_counter()
    function(*given)
    return time.perf_counter() - begin


def peak_bytes(who: int = resource.RUSAGE_SELF) -> int:
    """Peak resident memory of this process, or of the children that it has waited for."""
    return resource.getrusage(who).ru_maxrss << 10


def command(name: str, *words: object) -> list[str]:
    """The command of a benchmark, for a child process."""
    return [sys.executable, "-m", "benchmarks", name, *map(str, words)]


def run_child(name: str, *words: object) -> None:
    """A part of a benchmark in a process of its own, which prints for itself."""
    subprocess.run(command(name, *words), check=True)


def read_child(words: Sequence[str], **environment: str) -> Any:
    """Run a command; the JSON in the last line that it prints."""
    done = subprocess.run(words, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def show(text: str = "") -> None:
    """Print a line to stdout, at once: a benchmark may run for hours."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def show_json(value: object, indent: int | None = None) -> None:
    show(json.dumps(value, indent=indent, ensure_ascii=False))
