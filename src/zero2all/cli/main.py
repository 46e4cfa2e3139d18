"""The ``z2a`` command."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from zero2all import __version__
from zero2all.base.processes import stop_on_signals
from zero2all.cli import (
    bench,
    chat,
    ckpt,
    compare,
    corpus,
    doctor,
    launch,
    plugins,
    recipe,
    runs,
    serve,
    tokenizer,
    tokens,
    watch,
)
from zero2all.cli import eval as eval_command
from zero2all.cli import plan as plan_command
from zero2all.cli.conventions import ERROR_FILE, print_json

PANELS = {
    "Data": ("corpus", "tokenizer", "tokens"),
    "Train": ("quickstart", "recipe", "plugins", "plan", "train", "compare"),
    "Runs": ("watch", "blame", "ckpt", "chat", "serve", "export"),
    "Cluster": ("launch", "doctor"),
    "Measure": ("eval", "bench"),
}


SUGGESTIONS = {
    "generate": "chat RUN --prompt TEXT",
    "goodput": "watch RUN --once",
    "ladder": "compare RECIPE --widths N,N,...",
    "model": "plan PRESET|RECIPE|HF_DIR --layers",
    "profile": "bench profile RECIPE",
    "rendezvous": "launch --rendezvous-only",
    "report": "watch RUN --html FILE",
    "tune": "plan RECIPE --try",
    "sweep": "compare RECIPE KEY=VALUE,VALUE",
}
"""What to write for a word that is no command but names what one does."""


class PanelGroup(TyperGroup):
    """Prints its commands by panel, as plain text: help texts hold brackets that markup would take for tags."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in SUGGESTIONS:
            ctx.fail(f"No such command '{args[0]}'. Did you mean 'z2a {SUGGESTIONS[args[0]]}'?")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in PANELS.values() for name in names]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        limit = formatter.width - 6 - max(map(len, self.commands))
        for title, names in PANELS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit)) for name in names])


app = typer.Typer(
    name="z2a",
    cls=PanelGroup,
    help="zero2all: train language models from raw text, end to end.\n\nExample: z2a quickstart --out runs/first",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("quickstart")(runs.quickstart)
app.add_typer(recipe.app, name="recipe")
app.add_typer(corpus.app, name="corpus")
app.add_typer(tokenizer.app, name="tokenizer")
app.add_typer(tokens.app, name="tokens")
app.command("train")(runs.train)
app.command("launch")(launch.launch)
app.command("plan")(plan_command.plan)
app.add_typer(ckpt.app, name="ckpt")
app.command("plugins")(plugins.plugins)
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
