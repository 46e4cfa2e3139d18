"""z2a doctor"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Result, command


@command
def doctor(
    directory: Annotated[Path, typer.Option("--dir", help="Directory for runs; its disk is checked.")] = Path("runs"),
    json: Json = False,
) -> Result:
    """Check this machine, or all nodes and their network.

    To check all nodes, run 'z2a launch ... -- doctor'. The exit status is 1 if a check fails.

    Example: z2a doctor --dir runs
    """
    from zero2all.doctor.preflight import run_checks
    from zero2all.elastic.rendezvous_client import RendezvousStore
    from zero2all.environment import STORE_VARIABLE

    store = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # The agents' store: every node reaches it, even if the connection to the first node is broken.
        store = RendezvousStore.from_environment(
            os.environ[STORE_VARIABLE], os.environ["TORCHELASTIC_RUN_ID"], timedelta(seconds=60)
        )
    findings = run_checks(directory, store)
    text = "\n".join(map(str, findings)) if os.environ.get("RANK", "0") == "0" else ""
    result = Result({"findings": findings}, text)
    if any(finding.level == "bad" for finding in findings):
        result.show(json)
        raise typer.Exit(1)
    return result
