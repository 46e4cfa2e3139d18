"""z2a corpus build"""

from __future__ import annotations

import typer

from zero2all.cli.conventions import Json, Overrides, RecipePath, Result, command

app = typer.Typer(help="Raw files to documents.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Raw files to documents."""


@app.command()
@command
def build(recipe: RecipePath, overrides: Overrides = None, json: Json = False) -> Result:
    """Read every source of the recipe into Parquet documents, and count what was left out.

    Example: z2a corpus build my.yaml corpus.holdout=0.02
    """
    from zero2all.corpus import build_corpus
    from zero2all.recipe import load_recipe
    from zero2all.units import show_bytes

    loaded = load_recipe(recipe, overrides)
    manifest = build_corpus(loaded.corpus, loaded.documents_dir)
    text = f"{manifest['documents']} documents, {show_bytes(manifest['bytes'])} in {loaded.documents_dir}"
    return Result({"out": str(loaded.documents_dir), **manifest}, text + (" (unchanged)" if manifest["reused"] else ""))
