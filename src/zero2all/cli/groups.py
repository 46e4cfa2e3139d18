"""Command groups: the panels of ``z2a --help``, and ``z2a eval``."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

PANELS = {
    "Data": ("corpus", "tokenizer", "tokens"),
    "Train": ("quickstart", "recipe", "plan", "train", "compare"),
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


class EvalGroup(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            words = " ".join(["z2a eval loss", *args])
            raise typer.BadParameter(f"'z2a eval' is a group of commands: write '{words}'", ctx)
        return super().resolve_command(ctx, args)
