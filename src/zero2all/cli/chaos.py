"""z2a chaos"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Result, command


@command
def chaos(
    out: Annotated[Path, typer.Option("--out", help="Where the jobs run and the table is written.")],
    only: Annotated[list[str] | None, typer.Option("--only", help="A fault by name; may be given again.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Chooses ranks and steps.")] = 0,
    json: Json = False,
) -> Result:
    """Break small jobs in every way there is, and check that each one recovers to the last bit.

    Example: z2a chaos --out runs/chaos --only "kill a rank"
    """
    from zero2all.chaos.suite import run_suite, table

    rows = run_suite(out, only or [], seed)
    failed = [row.fault for row in rows if row.problems]
    result = Result({"failed": failed, "rows": [asdict(row) for row in rows]}, table(rows))
    if failed:
        result.show(json)
        raise typer.Exit(1)
    return result
