"""z2a eval report"""

from __future__ import annotations

from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Result, command


@command
def eval_report(
    runs: Annotated[list[str], typer.Argument(help="Run directories.", metavar="RUN...")],
    json: Json = False,
) -> Result:
    """Compare the evaluated checkpoints of runs, as Markdown.

    The values are those that 'z2a eval watch' and 'z2a eval probes' have recorded. 'z2a watch' plots them.

    Example: z2a eval report runs/first runs/deeper > evals.md
    """
    from zero2all.evals.report import read_evals, report_markdown

    found = read_evals(runs)
    return Result({"runs": found}, report_markdown(found))
