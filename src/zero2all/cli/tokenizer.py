"""z2a tokenizer train"""

from __future__ import annotations

from typing import Annotated

import typer

from zero2all.cli.conventions import (
    EngineKind,
    Json,
    Overrides,
    RayAddress,
    RecipePath,
    Result,
    Workers,
    command,
)

app = typer.Typer(help="Documents to a vocabulary.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Documents to a vocabulary."""


@app.command()
@command
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    engine: EngineKind = "local",
    workers: Workers = None,
    ray_address: RayAddress = None,
    max_memory: Annotated[
        str | None, typer.Option("--max-memory", help="Of all processes together, such as 2GiB; as in the recipe.")
    ] = None,
    json: Json = False,
) -> Result:
    """Learn a byte-level BPE vocabulary from the training documents, in bounded memory.

    Example: z2a tokenizer train my.yaml tokenizer.vocab_size=65536 --max-memory 4GiB
    """
    from zero2all.engine import Engine, all_cores
    from zero2all.recipe import load_recipe
    from zero2all.tokenizer import train_tokenizer

    memory = [f"tokenizer.max_memory={max_memory}"] if max_memory else []
    loaded = load_recipe(recipe, [*(overrides or []), *memory])
    where = Engine(engine, workers or all_cores(), ray_address)
    manifest = train_tokenizer(loaded.tokenizer, loaded.documents_dir, loaded.tokenizer_dir, where)
    text = f"{manifest['vocab_size']} tokens in {loaded.tokenizer_dir}"
    return Result({"out": str(loaded.tokenizer_dir), **manifest}, text + (" (unchanged)" if manifest["reused"] else ""))
