"""z2a doctor"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Result, command


@command
def doctor(
    directory: Annotated[Path, typer.Option("--dir", help="Where runs will be written.")] = Path("runs"),
    json: Json = False,
) -> Result:
    """Check this machine, or with 'z2a launch ... -- doctor' all nodes and their network. Fails if something is bad.

    Example: z2a doctor --dir runs
    """
    from zero2all.resilience.doctor import examine

    findings = examine(directory)
    text = "\n".join(map(str, findings)) if os.environ.get("RANK", "0") == "0" else ""
    result = Result({"findings": [asdict(finding) for finding in findings]}, text)
    if any(finding.level == "bad" for finding in findings):
        result.show(json)
        raise typer.Exit(1)
    return result
