"""z2a bench profile"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Overrides, RecipePath, Result, command
from zero2all.environment import quiet_profiler


@command
def profile(
    recipe: RecipePath,
    overrides: Overrides = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Number of timed steps, after two to warm up and before the traced.")
    ] = 5,
    out: Annotated[
        Path | None, typer.Option("--out", help="Directory of the profile. Default: profile, in that of the recipe.")
    ] = None,
    json: Json = False,
) -> Result:
    """Show where the time and memory of a training step go.

    Trains a few steps of a new run, which is removed. Writes a Chrome trace, the operators and a memory timeline.

    Example: z2a bench profile recipes/quickstart.yaml --steps 5 --out runs/profile
    """
    quiet_profiler()
    from zero2all.profiling import format_profile, profile_recipe
    from zero2all.recipe import load_recipe

    found = profile_recipe(load_recipe(recipe, overrides), steps, out)
    return Result({}, "") if found is None else Result(found, format_profile(found))
