"""What timing the parts of a step costs: one run, with the timer on and off in turns of one step.

    OMP_NUM_THREADS=1 python -m benchmarks step_timer --out runs/first --work /somewhere

``--out`` is a finished quickstart, whose tokens are trained on. Each step is compared with the one after it, so that a
machine that is slow for a while is slow for both; the result is the median of the ratios.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from pathlib import Path

from benchmarks.common import benchmark_parser, show

from zero2all.recipe import load_recipe
from zero2all.train import Trainer, TrainerHooks
from zero2all.train.data_loader import Batch

SKIPPED = 10


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    stages = [f"{name}.dir={options.out / directory}" for name, directory in
              (("corpus", "documents"), ("tokenizer", "tokenizer"), ("tokens", "tokens"))]  # fmt: skip
    quiet = ["checkpoint.every=1000000 steps", "checkpoint.flash_every=null", "track.log_every=100000"]
    settings = [f"out={options.work}", f"train.steps={options.steps + SKIPPED}", *stages, *quiet, *options.overrides]
    recipe = load_recipe(options.out / "run", settings)
    begun: list[float] = []

    def on_batch(batch: Batch) -> None:
        begun.append(time.perf_counter())
        trainer.timer.enabled = batch.step % 2 == 0

    with Trainer(recipe, TrainerHooks(on_batch=on_batch)) as trainer:
        trainer.train()
    seconds = [after - before for before, after in pairwise(begun)][SKIPPED:]
    # (on, off) and (off, on) in turns: a machine that becomes slower counts once for each.
    ratios = [first / second if at % 2 == 0 else second / first for at, (first, second) in enumerate(pairwise(seconds))]
    on, off = statistics.median(seconds[::2]), statistics.median(seconds[1::2])
    median = statistics.median(ratios)
    show(
        f"{len(seconds)} steps: {1000 * on:.2f} ms with the timer, {1000 * off:.2f} ms without; "
        f"median of the ratios of neighbours {median:.4f}"
    )
