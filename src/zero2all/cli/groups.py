"""Command groups: the panels of ``z2a --help``, and ``z2a eval``."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from zero2all.console import warn

PANELS = {
    "Data": ("corpus", "tokenizer", "tokens"),
    "Train": ("quickstart", "recipe", "model", "plan", "train", "tune", "sweep", "ladder", "align"),
    "Runs": ("watch", "report", "compare", "blame", "goodput", "ckpt", "generate", "chat", "serve", "export"),
    "Cluster": ("launch", "rendezvous", "doctor"),
    "Measure": ("eval", "profile", "bench"),
}

RETIRED_OPTIONS = {
    **{key: {"--world-size": "--gpus", "--world": "--gpus"} for key in ("train",)},
    **{key: {"--nproc-per-node": "--gpus", "--procs": "--gpus"} for key in ("compare", "sweep", "ladder", "tune")},
    "bench": {"--ranks": "--gpus"},
    "launch": {"--gpus": "--gpus-per-node"},
}
"""Options of version 0.2 by command, with their new names. The next version no longer accepts them."""


def with_new_names(words: list[str]) -> list[str]:
    """A command line with retired options replaced; what follows ``--`` belongs to a different command."""
    end = words.index("--") if "--" in words else len(words)
    renamed = RETIRED_OPTIONS.get(words[0], {}) if words else {}
    replaced = []
    for word in words[:end]:
        option, equals, value = word.partition("=")
        if option in renamed:
            warn(f"{option} is now {renamed[option]}")
        replaced.append(renamed.get(option, option) + equals + value)
    return [*replaced, *words[end:]]


class PanelGroup(TyperGroup):
    """Prints its commands by panel, as plain text: help texts hold brackets that markup would take for tags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_new_names(args))

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
