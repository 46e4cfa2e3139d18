"""z2a tune"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Overrides, RecipePath, Result, resumable_command
from zero2all.cli.experiments import Gpus, Name


@resumable_command
def tune(
    recipe: RecipePath,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The recipe to write. Default: RECIPE with the ending .tuned.yaml.")
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=2, max=100, help="Steps of a trial after warm-up, at least.")
    ] = 8,
    rounds: Annotated[
        int, typer.Option("--rounds", min=3, help="Rounds in which the finalists are measured again, in turns.")
    ] = 3,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", help="For the plan: a GPU, or a file of 'z2a doctor --calibrate'. Default: this machine."
        ),
    ] = None,
    gpus: Gpus = 1,
    name: Name = None,
    json: Json = False,
) -> Result:
    """Find the fastest settings by short trial runs.

    Tunes only what does not change the result: layout, micro-batch, activation checkpointing, kernels, compilation. A
    key on the command line is not tuned. Writes a recipe with the winner. The same command resumes.

    Example: z2a tune my.yaml train.compile=false
    """
    from zero2all.experiments.tune import TuneOptions, tune_recipe, tune_text

    options = TuneOptions(gpus, steps, rounds, gpu)
    report = tune_recipe(recipe, overrides or [], options, name, out)
    return Result(report, tune_text(report))
