"""z2a model show"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Overrides, Result, command

app = typer.Typer(help="Show the size and cost of a model before training.", no_args_is_help=True)


@app.command()
@command
def show(
    target: Annotated[
        str,
        typer.Argument(
            help="Name of a preset, a recipe file, or the directory of a run or of a Hugging Face model.",
            metavar="PRESET|RECIPE|HF_DIR",
        ),
    ],
    overrides: Overrides = None,
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu",
            help="Precision, memory and shape advice for this GPU, such as H100. This machine does not need one.",
        ),
    ] = "",
    json: Json = False,
) -> Result:
    """Print parameters, FLOPs, KV cache and memory of a model.

    It also prints the kernels selected on this machine and shape advice; for a Hugging Face directory, whether its
    weights can be used for train.init, and the section model of a recipe for them.

    Example: z2a model show z2all-1.1b train.seq_len=2048 --gpu H100
    """
    import torch

    from zero2all.hardware import pick_device, pick_gpu
    from zero2all.model.cost.describe import describe_model, model_text
    from zero2all.model.cost.named_gpu import with_precision_of
    from zero2all.model.hf_weights import CONFIG, read_hf_config, summarize_hf
    from zero2all.recipe import load_recipe_or_preset, recipe_for_model
    from zero2all.train.hyperparameters import fill_hyperparameters

    directory, weights = Path(target), None
    if (directory / CONFIG).exists():
        recipe, weights = recipe_for_model(read_hf_config(directory), overrides, target), summarize_hf(directory)
    else:
        recipe = load_recipe_or_preset(target, overrides)
    recipe = fill_hyperparameters(recipe)
    device, named = pick_device(recipe.train.device), pick_gpu(gpu)
    if gpu:
        device, recipe = torch.device("cuda"), with_precision_of(recipe, named)
    shown = describe_model(recipe, device, named, weights)
    return Result(shown, model_text(shown))
