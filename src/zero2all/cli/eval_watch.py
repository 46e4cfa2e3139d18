"""z2a eval watch"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Result, RunPath, command


@command
def eval_watch(
    run: RunPath,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            "--suite",
            help="A YAML file of probes, or a built-in suite. May be repeated. Default: that of 'z2a eval probes'.",
            metavar="FILE|NAME",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", help="The directory with the files of benchmarks. Default: no benchmarks.", metavar="DIR"
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", help="Name of a benchmark. May be given several times. Default: all in --data."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of items of a benchmark.")] = 200,
    poll: Annotated[float, typer.Option("--poll", min=0.1, help="Seconds between two looks for a checkpoint.")] = 30.0,
    once: Annotated[bool, typer.Option("--once", help="Evaluate the checkpoints that are there, and end.")] = False,
    json: Json = False,
) -> Result:
    """Evaluate each new checkpoint of a run beside training.

    Runs until the run ends, on any machine that sees its directory. Values are added to evals.jsonl, and 'z2a watch'
    shows them. Keep checkpoints long enough for it: checkpoint.keep_latest.

    Example: z2a eval watch runs/first --data eval --task arc_easy
    """
    from zero2all.evals.probe_suite import load_suite
    from zero2all.evals.probes import default_suites
    from zero2all.evals.report import WatchOptions, watch_run
    from zero2all.train import Run

    suites = [load_suite(name) for name in suite or default_suites(Run.open(run))]
    report = watch_run(str(run), WatchOptions(tuple(suites), data, tuple(task or ()), limit), poll, once)
    lines = [f"{len(report.evaluated)} checkpoints evaluated", *map(str, report.verdicts)]
    return Result(report, "\n".join(lines))
