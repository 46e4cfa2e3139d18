"""z2a align inspect"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Overrides, RecipePath, Result, command

app = typer.Typer(help="Look at the data of fine-tuning.", no_args_is_help=True)


@app.callback()
def align() -> None:
    """Makes it a group while it has one command."""


@app.command()
@command
def inspect(
    recipe: RecipePath,
    overrides: Overrides = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Number of conversations.")] = 3,
    json: Json = False,
) -> Result:
    """Show in colour which tokens of conversations are learned.

    The tokens must have been built. Without a terminal, what is learned is between ⟦ and ⟧.

    Example: z2a align inspect sft.yaml --count 5
    """
    from zero2all.align.inspect import inspect_conversations, render_conversations
    from zero2all.recipe import load_recipe

    found = inspect_conversations(load_recipe(recipe, overrides), count)
    return Result({"conversations": found}, render_conversations(found, sys.stdout.isatty()))
