"""How long OpenMP threads should spin at a barrier: the quickstart's training step, alone and beside busy processes.

    python -m benchmarks cpu_threads            # under 4 minutes; the machine must be idle otherwise
    python -m benchmarks cpu_threads --spins 300 3000 --seconds 3 --rounds 6 --beside 2

Every setting has a process of its own that lives from beginning to end, and they take turns, so that all see the same
machine. ``default`` is libgomp's own (GOMP_SPINCOUNT unset), ``passive`` is OMP_WAIT_POLICY=PASSIVE. Beside the step
run no busy processes, then as many as there are cores. Tokens a second: the median over turns; ratios are medians of
ratios to the turn of ``default`` in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.common import benchmark_parser, command, median_ratio, show, show_json, take_turns

from zero2all.base.charts.table import markdown_table

BUSY = "from zero2all.base.processes import end_with_parent; end_with_parent()\nwhile True: sum(range(100_000))"
UNSET = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
Speeds = dict[str, list[float]]


class Contender:
    """A process that trains for some seconds for each line on stdin."""

    def __init__(self, settings: dict[str, str]) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in UNSET}
        self.process = subprocess.Popen(
            command("cpu_threads", "--contender"), env=environment | settings, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, seconds: float) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        return float(json.loads(self.process.stdout.readline()))


def contend() -> None:
    """Tokens a second for each line of seconds; the end of input ends it."""
    from zero2all.bench.step import BenchStep
    from zero2all.recipe import load_recipe

    recipe = load_recipe(Path(__file__).parents[1] / "recipes" / "quickstart.yaml", ["model.vocab_size=4096"])
    step = BenchStep(recipe)
    step.run()
    for line in sys.stdin:
        begin, steps = time.monotonic(), 0
        while time.monotonic() < begin + float(line):
            step.run()
            steps += 1
        speed = steps * recipe.train.tokens_per_step / (time.monotonic() - begin)
        show(f"{speed}")


@contextmanager
def busy(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def turns(contenders: dict[str, Contender], rounds: int, seconds: float, beside: int) -> Speeds:
    with busy(beside):
        return take_turns({name: partial(one.run, seconds) for name, one in contenders.items()}, rounds)


def table(measured: dict[int, Speeds]) -> str:
    head = ["setting", *(cell for beside in measured for cell in (f"tokens/s beside {beside}", "of default"))]
    rows = []
    for name in next(iter(measured.values())):
        cells = [name]
        for speeds in measured.values():
            ratio = median_ratio(speeds[name], speeds["default"])
            cells += [f"{statistics.median(speeds[name]):,.0f}", f"{ratio:.2f}"]
        rows.append(cells)
    return markdown_table(head, rows)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--spins", type=int, nargs="*", default=[300, 1000, 3000, 10_000])
    parser.add_argument("--seconds", type=float, default=2.0, help="of one turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", type=int, nargs="*", default=[0, os.cpu_count() or 1], help="busy processes")
    parser.add_argument("--contender", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        contend()
        return
    settings: dict[str, dict[str, str]] = {"default": {}, "passive": {"OMP_WAIT_POLICY": "PASSIVE"}}
    settings |= {f"GOMP_SPINCOUNT={spins}": {"GOMP_SPINCOUNT": str(spins)} for spins in options.spins}
    contenders = {name: Contender(environment) for name, environment in settings.items()}
    try:
        for contender in contenders.values():
            contender.run(1.0)  # has started, and is warm
        measured = {beside: turns(contenders, options.rounds, options.seconds, beside) for beside in options.beside}
    finally:
        for contender in contenders.values():
            contender.process.kill()
            contender.process.wait()
    show(table(measured))
    show_json(measured)
