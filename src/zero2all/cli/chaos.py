"""z2a chaos"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Result, command
from zero2all.processes import require_linux


@command
def chaos(
    out: Annotated[Path, typer.Option("--out", help="Directory for the jobs and the result table.")],
    only: Annotated[list[str] | None, typer.Option("--only", help="Inject only this fault. Can be repeated.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed for the ranks and steps at which faults are injected.")] = 0,
    simulate: Annotated[
        int | None,
        typer.Option("--simulate", help="Instead, measure a rendezvous with this many simulated nodes, without ranks."),
    ] = None,
    over: Annotated[
        float, typer.Option("--over", min=0, help="With --simulate: the nodes arrive within this many seconds.")
    ] = 0.0,
    steady: Annotated[
        float, typer.Option("--steady", min=1, help="With --simulate: seconds for which heartbeats are measured.")
    ] = 20.0,
    jobs: Annotated[
        int,
        typer.Option("--jobs", "-j", min=1, help="Faults at a time. Times in the table are then of a busy machine."),
    ] = 1,
    json: Json = False,
) -> Result:
    """Inject faults into small jobs and check exact recovery.

    Example: z2a chaos --out runs/chaos --only "kill a rank"

    With --simulate 1024 it measures the rendezvous of a job of 1,024 nodes instead.
    """
    require_linux("z2a chaos")
    if simulate is not None:
        return _simulate(out, simulate, steady, over)
    from zero2all.chaos.suite import render_table, run_suite

    rows = run_suite(out, only or [], seed, jobs)
    failed = [row.fault for row in rows if row.problems]
    result = Result({"failed": failed, "rows": [asdict(row) for row in rows]}, render_table(rows))
    if failed:
        result.show(json)
        raise typer.Exit(1)
    return result


def _simulate(out: Path, nodes: int, steady: float, over: float) -> Result:
    from zero2all.chaos.scale_model import render_report, simulate
    from zero2all.io import write_json

    report = simulate(nodes, steady, over)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"scale-{nodes}.json", asdict(report))
    return Result(asdict(report), render_report(report))
