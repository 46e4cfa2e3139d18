"""z2a eval probes"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from zero2all.cli.conventions import Json, Result, command
from zero2all.cli.eval_bench import Target


@command
def eval_probes(
    target: Target,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            "--suite",
            help="A YAML file of probes, or one of the built-in suites english, chinese, stories. May be given several "
            "times. Default: english and chinese; for a run on the built-in stories, stories.",
            metavar="FILE|NAME",
        ),
    ] = None,
    steps: Annotated[
        Literal["newest", "all"], typer.Option("--steps", help="Evaluate the newest checkpoint of a run, or all.")
    ] = "newest",
    json: Json = False,
) -> Result:
    """Measure probabilities of continuations and sentences.

    The values of a run's checkpoints are added to its evals.jsonl, and 'z2a watch' shows them as curves. With several
    checkpoints, a test tells which probes trend as expected.

    Example: z2a eval probes runs/first --steps all
    """
    from zero2all.evals.probe_suite import load_suite
    from zero2all.evals.probes import default_suites, evaluate_checkpoints, find_checkpoints, format_probes

    suites = [load_suite(name) for name in suite or []]  # mistakes in them come before the weights are read
    locations = find_checkpoints(target, steps)
    suites = suites or [load_suite(name) for name in default_suites(locations[0].run)]
    report = evaluate_checkpoints(target, locations, suites)
    return Result(report, format_probes(report))
