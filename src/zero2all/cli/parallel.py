"""z2a parallel show"""

from __future__ import annotations

from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Overrides, RecipePath, Result, command

app = typer.Typer(help="How a model is laid over ranks.", no_args_is_help=True)


@app.command()
@command
def show(
    recipe: RecipePath,
    overrides: Overrides = None,
    world: Annotated[int, typer.Option("--world", min=1, help="Ranks of the run.")] = 1,
    json: Json = False,
) -> Result:
    """Lay a model over any number of ranks on paper: the mesh, every stage's layers, the bytes of a rank.

    Example: z2a parallel show recipes/70b-1024.yaml --world 1024
    """
    from zero2all.parallel.show import show_layout
    from zero2all.recipe import load_recipe
    from zero2all.units import show_count

    shown = show_layout(load_recipe(recipe, overrides), world)
    mesh = " x ".join(f"{name} {size}" for name, size in shown["mesh"].items() if size > 1) or "one process"
    held, parts = (
        shown["memory_per_rank"],
        {
            "parameters": "parameters (fp32)",
            "gradients": "gradients (fp32)",
            "optimizer": "optimizer",
            "gathered_weights": f"gathered weights ({shown['compute_dtype']})",
            "unsharded_gradients": "gradients before they are reduced",
        },
    )
    lines = [
        f"{show_count(shown['parameters'])} parameters on {world} ranks: {mesh}",
        f"a rank holds at most {held['total'] / 2**30:.2f} GiB, activations aside: "
        + ", ".join(f"{held[name] / 2**30:.2f} {text}" for name, text in parts.items()),
    ]
    for stage in shown["stages"]:
        lines.append(
            f"pipeline rank {stage['stage']}: {len(stage['layers'])} layers, {show_count(stage['parameters'])} "
            f"parameters, {show_count(stage['least'])} to {show_count(stage['most'])} on a rank"
        )
        lines += [f"  {name} {text}" for name, text in stage["examples"].items()]
    return Result(shown, "\n".join([*lines, "the shards of all ranks add up to the whole model"]))
