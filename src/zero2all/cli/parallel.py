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
    world: Annotated[int, typer.Option("--world", min=1, help="Number of ranks (world size).")] = 1,
    json: Json = False,
) -> Result:
    """Dry run: mesh, layers and memory per rank for N ranks.

    Example: z2a parallel show recipes/70b-1024.yaml --world 1024
    """
    from zero2all.parallel.dry_run import dry_run
    from zero2all.recipe import load_recipe
    from zero2all.train.hyperparameters import fill_hyperparameters
    from zero2all.units import show_count

    shown = dry_run(fill_hyperparameters(load_recipe(recipe, overrides)), world)
    mesh = " x ".join(f"{name} {size}" for name, size in shown.mesh.items() if size > 1) or "one process"
    memory = shown.memory_per_rank
    parts = {
        "parameters (fp32)": memory.parameters,
        "gradients (fp32)": memory.gradients,
        "optimizer": memory.optimizer,
        f"gathered weights ({shown.compute_dtype})": memory.gathered_weights,
        "unsharded gradients": memory.unsharded_gradients,
    }
    lines = [
        f"{show_count(shown.parameters)} parameters on {world} ranks: {mesh}",
        f"a rank holds at most {memory.total / 2**30:.2f} GiB, activations aside: "
        + ", ".join(f"{size / 2**30:.2f} {name}" for name, size in parts.items()),
    ]
    for stage in shown.stages:
        lines.append(
            f"pipeline rank {stage.stage}: {len(stage.layers)} layers, {show_count(stage.parameters)} "
            f"parameters, {show_count(stage.least)} to {show_count(stage.most)} on a rank"
        )
        lines += [f"  {name} {text}" for name, text in stage.examples.items()]
    return Result(shown, "\n".join([*lines, "the shards of all ranks add up to the full model"]))
