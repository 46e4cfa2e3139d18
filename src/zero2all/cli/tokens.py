"""z2a tokens build"""

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
    VerifyOutput,
    resumable_command,
)

app = typer.Typer(help="Tokenize documents.", no_args_is_help=True)


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
