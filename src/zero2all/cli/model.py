"""z2a model show"""

from __future__ import annotations

from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Overrides, RecipeOrPreset, Result, command

app = typer.Typer(help="Show the size and cost of a model before training.", no_args_is_help=True)


@app.command()
@command
def show(
    target: RecipeOrPreset,
    overrides: Overrides = None,
    gpu: Annotated[
        str,
        typer.Option("--gpu", help="GPU for the shape advice, such as H100. This machine does not need one."),
    ] = "",
    json: Json = False,
) -> Result:
    """Print parameters, FLOPs, KV cache and memory of a model.

    It also prints the kernels selected on this machine and shape advice.

    Example: z2a model show z2all-1.1b train.seq_len=2048 --gpu H100
    """
    from zero2all.hardware import pick_device, pick_gpu
    from zero2all.model.cost.describe import describe_model, model_text
    from zero2all.recipe import load_recipe_or_preset
    from zero2all.train.hyperparameters import fill_hyperparameters

    recipe = fill_hyperparameters(load_recipe_or_preset(target, overrides))
    shown = describe_model(recipe, pick_device(recipe.train.device), pick_gpu(gpu))
    return Result(shown, model_text(shown))
