"""z2a tokenizer train"""

from __future__ import annotations

import typer

from zero2all.cli.conventions import Json, Overrides, RecipePath, Result, command

app = typer.Typer(help="Documents to a vocabulary.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Documents to a vocabulary."""


@app.command()
@command
def train(recipe: RecipePath, overrides: Overrides = None, json: Json = False) -> Result:
    """Learn a byte-level BPE vocabulary from the training documents.

    Example: z2a tokenizer train my.yaml tokenizer.vocab_size=16384
    """
    from zero2all.recipe import load_recipe
    from zero2all.tokenizer import train_tokenizer

    loaded = load_recipe(recipe, overrides)
    manifest = train_tokenizer(loaded.tokenizer, loaded.documents_dir, loaded.tokenizer_dir)
    text = f"{manifest['vocab_size']} tokens in {loaded.tokenizer_dir}"
    return Result({"out": str(loaded.tokenizer_dir), **manifest}, text + (" (unchanged)" if manifest["reused"] else ""))
