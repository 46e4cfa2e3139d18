"""Random changes to valid inputs of every reader, loader, record and route, within a budget of time.

    python -m tests.adversarial.fuzz --seconds 1800 --jobs 2     # as .ci/long; exit 1 if there is a finding
    python -m tests.adversarial.fuzz --target recipe --input 1234 # one input again
    python -m tests.adversarial.fuzz --target recipe --target record --first 1000000 # inputs that were never tried

An input is a function of its target and number, so a finding is repeated by its number. Inputs are tried in another
process, which may crash, hang or take memory: that is then a finding, and the next process goes on after it.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from tests.adversarial.bounds import MEMORY, SECONDS, measure

WALL_FACTOR = 20.0  # times the seconds of CPU, for an input that waits
SHOWN = 10  # findings of a target
SLICE_SECONDS = 5.0  # that a target has before the next one has its turn
INTERESTING = (
    b"\0", b"\xff", b"\x80", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\x80", b"\n", b'"', b"\\", b"{", b"}",
    b"[", b"]", b",", b":", b"-1", b"0", b"1e999", b"NaN", b"9" * 400, b"[" * 2000, b"{\"a\":" * 500, b"null", b"true",
    b"../", b"%00", b"\x1b[2J", b"<script>", b"&a", b"*a", b"!!python/object:os.system", "春\u202e\ud7ff".encode(),
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    name: str
    examples: Callable[[], Sequence[bytes]]
    """Valid inputs."""
    attempt: Callable[[bytes], None]
    """Raises an exception if an input is not survived."""


@dataclass
class Tally:
    """What became of a target's inputs."""

    inputs: int = 0
    seconds: float = 0.0
    """Of the slowest."""
    memory: int = 0
    findings: list[str] = field(default_factory=list)
    next: int = 0
    """The number of the next input."""


@dataclass(frozen=True)
class Attempt:
    number: int
    seconds: float
    memory: int
    problem: str = ""


def mutate(examples: Sequence[bytes], rng: random.Random) -> bytes:
    """An example with one to eight changes."""
    data = bytearray(rng.choice(examples))
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at, size = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 4, 16, 256))
        match rng.randrange(8):
            case 0:
                data[at : at + size] = rng.randbytes(size)
            case 1:
                del data[at : at + size]
            case 2:
                data[at:at] = rng.choice(INTERESTING)
            case 3:
                data[at : at + size] = rng.choice(INTERESTING)
            case 4:
                data[at:at] = data[at : at + size] * rng.choice((1, 2, 50))
            case 5 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 6:
                other = rng.choice(examples)
                begin = rng.randrange(len(other) + 1)
                data[at : at + size] = other[begin : begin + size]
            case _:
                del data[at:]
    return bytes(data)


def make_input(target: Target, number: int) -> bytes:
    return mutate(target.examples(), random.Random(f"{target.name} {number}"))


def try_inputs(target: Target, first: int, deadline: float, seconds: float, memory: int, pipe: Connection) -> None:
    """In the child: announce each number before its input is tried, then send what it cost."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also in code that never returns to Python
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()  # reserved, not only touched
    resource.setrlimit(resource.RLIMIT_DATA, (used + 4 * memory + (1 << 30), resource.RLIM_INFINITY))
    null = os.open(os.devnull, os.O_WRONLY)
    faulthandler.disable()  # a crash is reported by its number
    os.dup2(null, 1)
    os.dup2(null, 2)
    number = first
    while number == first or time.monotonic() < deadline:  # one at least, however busy the machine is
        data = make_input(target, number)
        pipe.send(number)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        problem = ""

        def attempt(data: bytes = data) -> None:
            target.attempt(data)

        try:
            _, cost = measure(attempt)
            spent, peak = cost.seconds, cost.memory
        except BaseException:
            problem, spent, peak = traceback.format_exc(limit=-4), 0.0, 0
        signal.setitimer(signal.ITIMER_PROF, 0)
        if peak > memory:
            problem = f"takes {peak >> 20} MiB"
        pipe.send(Attempt(number, spent, peak, problem))
        number += 1


def fuzz(target: Target, budget: float, tally: Tally, seconds: float = SECONDS, memory: int = MEMORY) -> None:
    """Try inputs for ``budget`` seconds, after those of the tally."""
    target.examples()  # what is made once, is made before the children
    deadline, context = time.monotonic() + budget, multiprocessing.get_context("fork")
    number = tally.next
    while time.monotonic() < deadline:
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=try_inputs, args=(target, number, deadline, seconds, memory, theirs))
        child.start()
        theirs.close()
        try:
            number = _follow(ours, child, number, tally, seconds)
        finally:
            child.kill()
            child.join()
            ours.close()


def _follow(
    pipe: Connection, child: multiprocessing.process.BaseProcess, number: int, tally: Tally, seconds: float
) -> int:
    """Until the child ends; returns the number of the next input."""
    pending = False
    while True:
        try:
            if not pipe.poll(WALL_FACTOR * seconds):
                tally.findings.append(f"input {number}: no answer in {WALL_FACTOR * seconds:.0f} s")
                return _count(tally, number)
            message = pipe.recv()
        except (EOFError, OSError):
            child.join(30)
            if not pending:
                return number
            reason = f"more than {seconds:g} s" if child.exitcode == -signal.SIGPROF else f"status {child.exitcode}"
            tally.findings.append(f"input {number}: ended its process ({reason})")
            return _count(tally, number)
        if isinstance(message, int):
            number, pending = message, True
            continue
        pending, number = False, _count(tally, message.number)
        tally.seconds = max(tally.seconds, message.seconds)
        tally.memory = max(tally.memory, message.memory)
        if message.problem:
            tally.findings.append(f"input {message.number}: {message.problem}")


def _count(tally: Tally, number: int) -> int:
    """The number of the input after this one."""
    tally.inputs, tally.next = tally.inputs + 1, number + 1
    return number + 1


def fuzz_all(targets: Sequence[Target], budget: float, turn: float = SLICE_SECONDS, first: int = 0) -> dict[str, Tally]:
    """All targets in turn, until the time is over; every one has at least one turn."""
    tallies = {target.name: Tally(next=first) for target in targets}
    deadline = time.monotonic() + budget
    while True:
        for target in targets:
            fuzz(target, turn, tallies[target.name])
        if time.monotonic() >= deadline:
            return tallies


def table(tallies: dict[str, Tally]) -> str:
    lines = ["| target | inputs | slowest | peak memory | findings |", "|---|--:|--:|--:|--:|"]
    for name, tally in tallies.items():
        cost = f"{tally.seconds:.2f} s | {tally.memory >> 20} MiB"
        lines.append(f"| {name} | {tally.inputs} | {cost} | {len(tally.findings)} |")
    total = sum(tally.inputs for tally in tallies.values())
    worst = max(tally.seconds for tally in tallies.values())
    peak, found = max(tally.memory for tally in tallies.values()), sum(len(t.findings) for t in tallies.values())
    return "\n".join([*lines, f"| **all** | {total} | {worst:.2f} s | {peak >> 20} MiB | {found} |"])


def _one_job(names: Sequence[str], seconds: float, first: int) -> dict[str, Tally]:
    from tests.adversarial.fuzz_targets import TARGETS

    return fuzz_all([target for target in TARGETS if target.name in names], seconds, first=first)


def main() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from tests.adversarial.fuzz_targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--target", choices=[target.name for target in TARGETS], action="append", default=[])
    parser.add_argument("--first", type=int, default=0, help="The number of the first input.")
    parser.add_argument("--input", type=int, help="Try this input alone, in this process.")
    options = parser.parse_args()
    if options.input is not None:
        target = next(target for target in TARGETS if target.name in options.target)
        data = make_input(target, options.input)
        sys.stdout.write(f"{data[:2000]!r}\n")
        sys.stdout.write(f"{measure(lambda: target.attempt(data))[1]}\n")
        return
    names = options.target or [target.name for target in TARGETS]
    shares = [names[job :: options.jobs] for job in range(options.jobs) if names[job :: options.jobs]]
    with ThreadPoolExecutor(len(shares)) as pool:
        done = list(pool.map(lambda share: _one_job(share, options.seconds, options.first), shares))
    tallies = {name: found for part in done for name, found in part.items()}
    sys.stdout.write(f"{table(tallies)}\n")
    findings = [f"{name} {line}" for name, tally in tallies.items() for line in tally.findings[:SHOWN]]
    sys.stdout.write("".join(f"{line}\n" for line in findings))
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
