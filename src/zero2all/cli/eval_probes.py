"""z2a eval probes"""

from __future__ import annotations

from typing import Annotated

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
    json: Json = False,
) -> Result:
    """Measure probabilities of continuations and sentences.

    The values of a run's newest checkpoint are added to its evals.jsonl, and 'z2a watch' shows them as curves. Once
    several checkpoints are evaluated, as by 'z2a eval watch', a test tells which probes trend as expected.

    Example: z2a eval probes runs/first
    """
    from zero2all.evals.probe_suite import load_suite
    from zero2all.evals.probes import evaluate_probes, format_probes

    report = evaluate_probes(target, [load_suite(name) for name in suite or []])
    return Result(report, format_probes(report))
