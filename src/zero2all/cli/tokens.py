"""z2a tokens build | trace"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from zero2all.cli.conventions import (
    EngineKind,
    Json,
    Overrides,
    RayAddress,
    RecipePath,
    Result,
    RunPath,
    VerifyOutput,
    command,
    resumable_command,
)

app = typer.Typer(help="Tokenize documents; trace a step to its documents.", no_args_is_help=True)


@app.command()
@resumable_command
def build(
    recipe: RecipePath,
    overrides: Overrides = None,
    engine: EngineKind = "local",
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="Number of local processes. One process already uses all cores.")
    ] = 1,
    ray_address: RayAddress = None,
    verify: VerifyOutput = False,
    json: Json = False,
) -> Result:
    """Tokenize documents into a Megatron-compatible store.

    Example: z2a tokens build my.yaml
    """
    from zero2all.engine import Engine
    from zero2all.recipe import load_recipe
    from zero2all.tokens import build_tokens
    from zero2all.units import show_count

    loaded = load_recipe(recipe, overrides)
    where = Engine(engine, workers, ray_address)

    def before_replace() -> None:
        from zero2all.train.data_in_use import commands_beside, refuse_store_change

        remedy = commands_beside("tokens", loaded, recipe, overrides or [])
        refuse_store_change(loaded.tokens_dir, loaded.out, remedy)

    built = build_tokens(
        loaded.tokens, loaded.documents_dir, loaded.tokenizer_dir, loaded.tokens_dir, where, before_replace, verify
    )
    text = f"{show_count(built.tokens)} tokens in {loaded.tokens_dir}"
    return Result(
        {"out": str(loaded.tokens_dir), "kind": "tokens", **asdict(built)},
        text + (" (unchanged)" if built.reused else ""),
    )


@app.command()
@command
def trace(
    run: RunPath,
    step: Annotated[int, typer.Option("--step", help="The training step, counted from 0.")],
    json: Json = False,
) -> Result:
    """List the documents in the batch of a training step.

    'z2a blame' also computes their losses.

    Example: z2a tokens trace runs/first --step 10
    """
    from zero2all.train import Run, trace_step

    traced = trace_step(Run.open(run), step)
    lines = [f"step {step}: samples {traced['samples'][0]} to {traced['samples'][1] - 1}"]
    lines += [
        f"{part['sample']:>9}  {part['gid']}  {part['source']:<12} {part['tokens']:>6} tokens  {part['title']}"
        for part in traced["documents"]
    ]
    return Result(traced, "\n".join(lines))
