"""``z2a plan --try`` against an exhaustive grid: is its winner within 5% of the best, in under a third of the trials?

    z2a quickstart --out runs/tune train.steps=1
    python -m benchmarks tune runs/tune/recipe.yaml model.preset=z2all-25m train.seq_len=128 train.batch_tokens=2Ki \\
        train.compile=false --steps 5             # about two hours on two cores; the machine must be idle otherwise

The tuner runs first. Then every candidate is measured in each of ``--rounds`` rounds, every other round backwards, and
its speed is the median over rounds. Both are resumed by the same command.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.common import benchmark_parser, show, show_json

from zero2all.experiments.stages import build_missing_stages
from zero2all.experiments.tune import Trials, TuneOptions, tune_recipe, tune_text
from zero2all.experiments.variants import VariantGroup, make_plan
from zero2all.recipe import load_recipe


def measure_grid(path: Path, words: list[str], options: TuneOptions) -> dict[str, float]:
    """Median seconds of a step of each candidate that runs, by its label."""
    group = VariantGroup("grid", path, words, load_recipe(path, words), {})
    plan = make_plan("tune-grid", "tune", [], [group], seeds=1)
    build_missing_stages(plan.variants[0].recipe, {})
    trials = Trials(plan, words, options)
    seconds: dict[str, list[float]] = {}
    for number in range(options.rounds):
        for point, candidate in list(trials.grid.candidates.items())[:: -1 if number % 2 else 1]:
            if (measured := trials.measure(point, is_final=False)) is not None:
                seconds.setdefault(candidate.label, []).append(measured)
    return {label: statistics.median(times) for label, times in seconds.items() if len(times) == options.rounds}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=8, help="of a trial, after warm-up")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_intermixed_args()
    tune_options = TuneOptions(steps=options.steps, rounds=options.rounds)
    report = tune_recipe(options.recipe, options.overrides, tune_options)
    show(tune_text(report))
    grid = measure_grid(options.recipe, options.overrides, tune_options)
    best, winner = min(grid, key=grid.__getitem__), report.rows[0].candidate
    result = {
        "candidates": report.candidates,
        "grid_trials": options.rounds * report.candidates,
        "tune_trials": report.trials,
        "tried_candidates": len(report.rows),
        "best": best,
        "winner": winner,
        "winner_slower_by": grid[winner] / grid[best] - 1,
    }
    show_json(result, indent=2)
