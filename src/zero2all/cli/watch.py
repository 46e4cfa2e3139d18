"""z2a watch | report | blame"""

from __future__ import annotations

import json as jsonlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zero2all.cli.conventions import Json, Result, RunPath, command

if TYPE_CHECKING:
    from zero2all.track.watched import WatchedRun

Targets = Annotated[
    list[str],
    typer.Argument(help="Run directories, directories of runs, or ssh://[user@]host[:port]/path.", metavar="RUN..."),
]
Ssh = Annotated[str, typer.Option("--ssh", help="The ssh command, such as 'ssh -F other.config'.")]


@command
def watch(
    runs: Targets,
    once: Annotated[bool, typer.Option("--once", help="Say how the runs stand, and end.")] = False,
    tty: Annotated[bool, typer.Option("--tty", help="Charts in this terminal instead of a page.")] = False,
    host: Annotated[str, typer.Option(help="Where the page is served; others can reach 0.0.0.0.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    ssh: Ssh = "ssh",
    json: Json = False,
) -> Result:
    """Follow runs as they are written: a live page, a terminal view, or a verdict in words.

    Example: z2a watch runs/first ssh://me@cluster/runs/big
    """
    from zero2all.console import console
    from zero2all.track.terminal import verdict_lines, watch_terminal

    opened = _open(runs, ssh)
    if once:
        for run in opened:
            run.catch_up()
        return Result(
            {"runs": [_status(run) for run in opened]}, "\n".join(line for run in opened for line in verdict_lines(run))
        )
    if tty:
        watch_terminal(opened, console)
        return Result({"runs": [run.status() for run in opened]}, "")
    _serve(opened, host, port)
    return Result({"runs": [run.name for run in opened]}, "")


@command
def report(
    runs: Targets,
    html: Annotated[Path, typer.Option("--html", help="The file to write.")],
    ssh: Ssh = "ssh",
    json: Json = False,
) -> Result:
    """Write the charts, samples, events, recipe and environment of runs as one HTML file that stands alone.

    Example: z2a report runs/first --html first.html
    """
    from zero2all.errors import need
    from zero2all.io import write_text

    need("starlette", "track")
    from zero2all.track.report import report_html

    opened = _open(runs, ssh)
    for run in opened:
        run.catch_up()
    write_text(html, report_html(opened))
    return Result({"html": str(html), "bytes": html.stat().st_size}, f"written to {html}")


@command
def blame(
    run: RunPath,
    step: Annotated[int, typer.Option("--step", help="Step, counted from 0.")],
    top: Annotated[int, typer.Option("--top", min=1, help="How many documents to print.")] = 20,
    json: Json = False,
) -> Result:
    """Show the documents of a step by their loss, recomputed with the nearest checkpoint, worst first.

    Example: z2a blame runs/first --step 320
    """
    from zero2all.train import Run, blame_step

    blamed = blame_step(Run.open(run), step)
    lines = [f"step {step}: mean loss {blamed['loss']:.4f} with the weights of step {blamed['checkpoint']}"]
    for part in blamed["documents"][:top]:
        lines.append(f"{part['loss']:>8.4f}  {part['source']:<12} {part['tokens']:>6} tokens  {part['title']}")
        lines.append(f"          {' '.join(part['text'].split())[:100]}")
    return Result(blamed, "\n".join(lines))


def _status(run: WatchedRun) -> dict[str, Any]:
    from zero2all.track.terminal import judged
    from zero2all.track.watched import reason

    try:
        return {**run.status(), "verdicts": [verdict.as_dict() for verdict in judged(run)]}
    except Exception as error:  # the other runs are shown all the same
        return {"name": run.name, "trouble": reason(error), "verdicts": []}


def _open(targets: list[str], ssh: str) -> list[WatchedRun]:
    from zero2all.track.places import find_runs
    from zero2all.track.watched import WatchedRun

    opened = [WatchedRun(place) for target in targets for place in find_runs(target, ssh)]
    for run in opened:
        run.refresh()
    return opened


def _serve(runs: list[WatchedRun], host: str, port: int) -> None:
    import secrets

    from zero2all.console import say
    from zero2all.errors import need

    need("starlette", "track")
    need("uvicorn", "track")
    from zero2all.track.server import build_app, serve

    key = secrets.token_urlsafe(16)

    def ready(taken: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        say(f"watching {', '.join(run.name for run in runs)} at http://{shown}:{taken}/?key={key}  (Ctrl-C ends it)")

    serve(build_app(runs, key, _documents), host, port, ready)


def _documents(directory: Path, step: int, losses: bool) -> dict[str, Any]:
    """``z2a tokens trace`` or ``z2a blame`` in a process of its own: the page's server stays small."""
    from zero2all.errors import Z2aError

    words = ["blame"] if losses else ["tokens", "trace"]
    start = f"from zero2all.processes import end_with_parent; end_with_parent({os.getpid()})"
    program = [sys.executable, "-c", f"{start}; from zero2all.cli.main import main; main()"]
    done = subprocess.run(
        [*program, *words, str(directory), "--step", str(step), "--json"], capture_output=True, text=True, timeout=600
    )
    found: dict[str, Any] = jsonlib.loads(done.stdout or '{"error": "no answer"}')
    if "error" in found:
        raise Z2aError(found["error"])
    return found
