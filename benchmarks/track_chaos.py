"""Step time of training with the record on, and with each fault, relative to logging off.

    OMP_NUM_THREADS=1 python -m benchmarks track_chaos --out runs/first --work /somewhere --rounds 3

``--out`` is a finished quickstart: its tokens are trained on, in batches half as large. Runs of 100 steps, each in a
process of its own, take turns of a few steps, so that a machine that is slow for a while is slow for all; the result is
the ratio of median step times.
"""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.common import benchmark_parser, show_json
from tests.track.chaos import KINDS, chaos

from zero2all.recipe import Recipe, load_recipe
from zero2all.train import TrainerHooks, train
from zero2all.train.data_loader import Batch

STEPS, SKIPPED = 100, 20
TURN = 5  # steps


def run_in_turns(kind: str, recipe: Recipe, work: Path, turns: Connection) -> None:
    """Wait for each turn, outside of the steps; at the end send the seconds of each step."""
    begun: list[float] = []
    taken: list[float] = []
    with chaos(kind, work) as on_step:

        def on_batch(batch: Batch) -> None:
            begun.append(time.perf_counter())
            if len(begun) > TURN or batch.step == 0:
                taken.extend(after - before for before, after in pairwise(begun))
                turns.send(None)
                turns.recv()
                begun[:] = [time.perf_counter()]
            on_step(batch.step)

        train(recipe, hooks=TrainerHooks(on_batch=on_batch))
    turns.send(taken[SKIPPED:])


def round_of_turns(recipes: dict[str, tuple[Recipe, Path]]) -> dict[str, list[float]]:
    context = multiprocessing.get_context("spawn")
    ends = {}
    for kind, (recipe, work) in recipes.items():
        ends[kind], child = context.Pipe()
        context.Process(target=run_in_turns, args=(kind, recipe, work, child), daemon=True).start()
        child.close()
        ends[kind].recv()  # it is ready
    seconds: dict[str, list[float]] = {}
    order = list(ends)
    while ends:
        order.append(order.pop(0))  # so that no run always follows the same one
        for kind in [kind for kind in order if kind in ends]:
            end = ends[kind]
            end.send(None)
            if (timings := end.recv()) is not None:
                seconds[kind] = timings
                del ends[kind]
    return seconds


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    stages = [f"{name}.dir={options.out / place}" for name, place in (("tokenizer", "tokenizer"), ("tokens", "tokens"))]
    changes = [f"train.steps={STEPS}", "train.batch_tokens=1024"]
    changes += ["checkpoint.every=1000 steps", "track.log_every=1000"]
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(options.rounds):
        works = {kind: options.work / f"{turn}-{kind.replace(' ', '-')}" for kind in KINDS}
        recipes = {
            kind: (load_recipe(options.out / "recipe.yaml", [*stages, *changes, f"out={work / 'out'}"]), work)
            for kind, work in works.items()
        }
        for kind, timings in round_of_turns(recipes).items():
            seconds[kind] += timings
        for work in works.values():
            shutil.rmtree(work, ignore_errors=True)
    medians = {kind: statistics.median(timings) for kind, timings in seconds.items()}
    report = {kind: {"step_seconds": took, "against_off": took / medians["off"]} for kind, took in medians.items()}
    show_json(report, indent=2)
