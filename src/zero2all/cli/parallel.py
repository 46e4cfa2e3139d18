"""z2a parallel show"""

from __future__ import annotations

from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Overrides, RecipePath, Result, command

app = typer.Typer(help="Plan the parallelism of a run.", no_args_is_help=True)


@app.command()
@command
def show(
    recipe: RecipePath,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="Number of GPUs: one rank each.")] = 1,
    memory: Annotated[
        str, typer.Option(help="Free memory of a device, such as 80GiB, for train.micro_batch_tokens=auto.")
    ] = "",
    json: Json = False,
) -> Result:
    """Dry run: mesh, layers and memory per rank for N ranks.

    Example: z2a parallel show recipes/70b-1024.yaml --gpus 1024
    """
    from zero2all.parallel.dry_run import dry_run, dry_run_text
    from zero2all.recipe import load_recipe
    from zero2all.train.hyperparameters import fill_hyperparameters, with_hyperparameters
    from zero2all.train.micro_batch import estimate_micro_batch, planned_gpu_memory

    filled = fill_hyperparameters(load_recipe(recipe, overrides))
    chosen = estimate_micro_batch(filled, gpus, planned_gpu_memory(filled, memory))
    shown = dry_run(with_hyperparameters(filled, chosen), gpus)
    return Result(shown, "\n".join([*(f"chosen: {value}" for value in chosen), dry_run_text(shown)]))
