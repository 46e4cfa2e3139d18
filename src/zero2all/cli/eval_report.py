"""z2a eval report"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Result, command


@command
def eval_report(
    runs: Annotated[list[str], typer.Argument(help="Run directories.", metavar="RUN...")],
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the report with plots to this HTML file. Default: none.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write the report to this Markdown file. Default: none.")
    ] = None,
    json: Json = False,
) -> Result:
    """Compare the evaluated checkpoints of runs.

    The values are those that 'z2a eval watch' and 'z2a eval probes' have recorded.

    Example: z2a eval report runs/first runs/deeper --html evals.html
    """
    from zero2all.evals.report import read_evals, report_html, report_markdown
    from zero2all.io import write_text

    found = read_evals(runs)
    text = report_markdown(found)
    if html is not None:
        write_text(html, report_html(found))
    if markdown is not None:
        write_text(markdown, text)
    return Result({"runs": found}, text)
