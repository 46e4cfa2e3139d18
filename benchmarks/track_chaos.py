"""Step time of training with the record on, and with each way for it to go wrong, against logging off.

    python -m benchmarks.track_chaos --out runs/first --work /somewhere --rounds 5

``--out`` is a finished quickstart: its tokens are trained on. Runs of 100 steps take turns; the figure is the median
over rounds of the ratio of median step times in the same round.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

from tests.track.chaos import KINDS, chaos

from zero2all.recipe import Recipe, load_recipe
from zero2all.train import train
from zero2all.train.batches import Batch

STEPS, SKIPPED = 100, 20


def step_seconds(kind: str, recipe: Recipe, work: Path) -> float:
    times: list[float] = []
    with chaos(kind, work) as on_step:

        def on_batch(batch: Batch) -> None:
            times.append(time.perf_counter())
            on_step(batch.step)

        train(recipe, on_batch=on_batch)
    taken = [after - before for before, after in pairwise(times)]
    return statistics.median(taken[SKIPPED:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    stages = [f"{name}.dir={options.out / place}" for name, place in (("tokenizer", "tokenizer"), ("tokens", "tokens"))]
    changes = [f"train.steps={STEPS}", "checkpoint.every=1000 steps", "track.print_every=1000"]
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(options.rounds):
        for kind in KINDS:
            work = options.work / f"{turn}-{kind.replace(' ', '-')}"
            recipe = load_recipe(options.out / "recipe.yaml", [*stages, *changes, f"out={work / 'out'}"])
            seconds[kind].append(step_seconds(kind, recipe, work))
            shutil.rmtree(work, ignore_errors=True)
    ratios = {
        kind: statistics.median(mine / off for mine, off in zip(seconds[kind], seconds["off"], strict=True))
        for kind in KINDS
    }
    found = {kind: {"step_seconds": statistics.median(seconds[kind]), "against_off": ratios[kind]} for kind in KINDS}
    sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
