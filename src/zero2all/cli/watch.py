"""z2a watch | blame"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zero2all.base.errors import UsageError, need
from zero2all.cli.conventions import Json, Result, RunPath, command

if TYPE_CHECKING:
    from zero2all.track.run_view import RunView

RunTargets = Annotated[
    list[str],
    typer.Argument(help="Run directories, directories of runs, or ssh://[user@]host[:port]/path.", metavar="RUN..."),
]
Ssh = Annotated[str, typer.Option("--ssh", help="The ssh command to use, such as 'ssh -F other.config'.")]

MAX_NAMES = 20  # of runs, in a line of the terminal
SHOWN_DOCUMENTS = 20  # by loss


@command
def watch(
    runs: RunTargets,
    once: Annotated[
        bool, typer.Option("--once", help="Print status, goodput and findings, and exit, such as in a script.")
    ] = False,
    tty: Annotated[bool, typer.Option("--tty", help="Draw charts in the terminal instead of a web page.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", help="Write the page with its data to this file and exit, to share or to keep. Default: serve it."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to serve the page on. With 0.0.0.0 other machines can reach it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve the page on. 0 picks a free port.")] = 0,
    key_file: Annotated[
        Path | None,
        typer.Option("--key-file", help="Keep the key of the page in this file. Default: a new key at every start."),
    ] = None,
    ssh: Ssh = "ssh",
    json: Json = False,
) -> Result:
    """Watch runs live in a browser or terminal.

    With --once, print their status, goodput and findings, and exit. With --html, write a standalone report: charts,
    samples, events, recipe and environment. /metrics of the page's server is for Prometheus, which reads the same
    --key-file.

    Example: z2a watch runs/first ssh://me@cluster/runs/big

    Example: z2a watch runs/first --html first.html
    """
    from zero2all.base.console import console
    from zero2all.track.terminal import checked_status, health_report_lines, watch_terminal

    if sum((once, tty, html is not None)) > 1:
        raise UsageError("give one of --once, --tty and --html")
    if html is not None:
        need("starlette", "track")
    opened = _open_runs(runs, ssh, read=once or tty)  # the page is there before all of many runs are read
    if once or html is not None:
        for run in opened:
            run.read_to_end()
    if html is not None:
        return _write_page(opened, html)
    if once:
        return Result(
            {"runs": [checked_status(run) for run in opened]},
            "\n".join(line for run in opened for line in health_report_lines(run)),
        )
    with suppress(KeyboardInterrupt):  # the usual end of watching, not a failure
        if tty:
            watch_terminal(opened, console)
        else:
            _serve_page(opened, [target for target in runs if not target.startswith("ssh://")], host, port, key_file)
    return Result({"runs": [run.status() for run in opened]}, "")


@command
def blame(
    run: RunPath,
    step: Annotated[int, typer.Option("--step", help="The training step, counted from 0.")],
    lowest: Annotated[
        bool, typer.Option("--lowest", help="List the lowest loss first: text that the model knows, such as repeats.")
    ] = False,
    no_loss: Annotated[
        bool, typer.Option("--no-loss", help="List all documents in their order. This needs no checkpoint.")
    ] = False,
    json: Json = False,
) -> Result:
    """List the documents of a step, highest loss first.

    Losses are recomputed with the nearest checkpoint. Prints 20 documents; --json has all of them.

    Example: z2a blame runs/first --step 320
    """
    from zero2all.train import Run, blame_step
    from zero2all.train.blame import trace_text

    opened = Run.open(run)
    if no_loss:
        result = trace_text(opened, step)
        first, stop = result["samples"]
        lines = [f"step {step}: samples {first} to {stop - 1}"]
    else:
        result = blame_step(opened, step, lowest=lowest)
        lines = [f"step {step}: mean loss {result['loss']:.4f} with the weights of step {result['checkpoint']}"]
    for document in result["documents"][: None if no_loss else SHOWN_DOCUMENTS]:
        words = " ".join(document["text"].split())[:100]
        number = f"{document['sample']:>8}" if no_loss else f"{document['loss']:>8.4f}"
        facts = f"{number}  {document['source']:<12} {document['tokens']:>6} tokens"
        lines.append(f"{facts}  {document['title'] or words}")
        if document["title"]:
            lines.append(f"          {words}")
    return Result(result, "\n".join(lines))


def _open_runs(targets: list[str], ssh: str, *, read: bool = True) -> list[RunView]:
    from zero2all.track.run_locations import find_runs
    from zero2all.track.run_view import RunView

    opened = [RunView(location) for location in find_runs(targets, ssh)]
    for run in opened if read else []:
        run.refresh()
    return opened


def _write_page(runs: list[RunView], html: Path) -> Result:
    from zero2all.base.io import write_text
    from zero2all.track.html_report import report_html

    write_text(html, report_html(runs))
    return Result({"html": str(html), "bytes": html.stat().st_size}, f"written to {html}")


def _serve_page(runs: list[RunView], local_targets: list[str], host: str, port: int, key_file: Path | None) -> None:
    """Runs that begin below a local target later are shown too."""
    from zero2all.base.console import say

    need("starlette", "track")
    need("uvicorn", "track")
    from zero2all.cli.documents_process import DocumentsProcess
    from zero2all.track.http_server import load_key, new_key, serve
    from zero2all.track.server import build_app

    key = new_key() if key_file is None else load_key(key_file)

    def ready(bound_port: int) -> None:
        url_host = f"[{host}]" if ":" in host else host
        names = ", ".join(run.name for run in runs) if len(runs) <= MAX_NAMES else f"{len(runs)} runs"
        say(f"watching {names} at http://{url_host}:{bound_port}/?key={key}  (Ctrl-C to stop)")

    search = (lambda: _open_runs(local_targets, "", read=False)) if local_targets else None
    with DocumentsProcess() as documents:
        if local_targets:
            documents.start()  # it imports torch while the reader looks at the curves
        serve(build_app(runs, key, documents, search), host, port, ready)
