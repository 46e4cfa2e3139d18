"""The ``z2a`` command."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from zero2all import __version__
from zero2all.cli import (
    bench,
    chat,
    ckpt,
    compare,
    corpus,
    doctor,
    launch,
    recipe,
    runs,
    serve,
    tokenizer,
    tokens,
    watch,
)
from zero2all.cli import eval as eval_command
from zero2all.cli import plan as plan_command
from zero2all.cli import quickstart as quickstart_command
from zero2all.cli.conventions import ERROR_FILE, print_json
from zero2all.cli.groups import PanelGroup
from zero2all.processes import stop_on_signals

app = typer.Typer(
    name="z2a",
    cls=PanelGroup,
    help="zero2all: train language models from raw text, end to end.\n\nExample: z2a quickstart --out runs/first",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("quickstart")(quickstart_command.quickstart)
app.add_typer(recipe.app, name="recipe")
app.add_typer(corpus.app, name="corpus")
app.add_typer(tokenizer.app, name="tokenizer")
app.add_typer(tokens.app, name="tokens")
app.command("train")(runs.train)
app.command("launch")(launch.launch)
app.command("plan")(plan_command.plan)
app.add_typer(ckpt.app, name="ckpt")
app.command("doctor")(doctor.doctor)
app.command("compare")(compare.compare)
app.add_typer(eval_command.app, name="eval")
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("export")(runs.export)
app.add_typer(bench.app, name="bench")
app.command("watch")(watch.watch)
app.command("blame")(watch.blame)


def _version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"zero2all {__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Holds the options of ``z2a`` itself."""


def main() -> None:
    if ERROR_FILE not in os.environ:  # an agent reads from the way a rank ends what has happened to it
        stop_on_signals()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # text in any script must come out on any console
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        app()
    except SystemExit as stop:
        # A command line that does not parse never reaches a command, so nobody has printed the object yet.
        if stop.code == 2 and "--json" in sys.argv:
            print_json({"error": "wrong usage; see stderr", "problems": []})
        raise
