"""z2a model show"""

from __future__ import annotations

from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Overrides, Result, Target, command

app = typer.Typer(help="What a model is made of and what it costs, before it is built.", no_args_is_help=True)


@app.command()
@command
def show(
    target: Target,
    overrides: Overrides = None,
    gpu: Annotated[str, typer.Option("--gpu", help="Which GPU the shape advice is for; it need not be here.")] = "",
    json: Json = False,
) -> Result:
    """Print parameters by part, FLOPs, KV cache, training memory, the chosen ops and shape advice.

    Example: z2a model show z2all-1.1b train.seq_len=2048 --gpu H100
    """
    from zero2all.hardware import pick_device, pick_gpu
    from zero2all.model.describe import describe_model, model_text
    from zero2all.recipe import recipe_or_preset

    recipe = recipe_or_preset(target, overrides)
    shown = describe_model(recipe, pick_device(recipe.train.device), pick_gpu(gpu))
    return Result(shown, model_text(shown))
