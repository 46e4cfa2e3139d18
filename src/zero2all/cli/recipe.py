"""z2a recipe show | check | schema"""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated

import typer

from zero2all.cli.conventions import Json, Overrides, RecipePath, Result, command

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zero2all.recipe import Mistake, Recipe

app = typer.Typer(help="Show and validate recipes; print their JSON Schema.", no_args_is_help=True)


@app.command()
@command
def show(recipe: RecipePath, overrides: Overrides = None, json: Json = False) -> Result:
    """Print a recipe with all defaults filled in.

    Example: z2a recipe show recipes/quickstart.yaml model.num_hidden_layers=4
    """
    from zero2all.recipe import load_recipe, recipe_yaml

    resolved = load_recipe(recipe, overrides)
    return Result(resolved, recipe_yaml(resolved))


@app.command()
@command
def check(
    recipe: RecipePath,
    overrides: Overrides = None,
    no_import: Annotated[
        bool, typer.Option("--no-import", help="Import no code that the recipe names: for one from somebody else.")
    ] = False,
    json: Json = False,
) -> Result:
    """Validate a recipe and report all its mistakes at once.

    Each mistake is shown with its line or override and, for a misspelled key, the closest known key. Local paths of
    sources must exist; URLs are not looked up. The weights of train.init must be of the recipe's model. A vocabulary of
    the tokenizer that differs from the model's is reported. The plugins that the recipe names are listed with
    their files. Remarks say where the parallel layout changes
    losses by more than rounding.

    Example: z2a recipe check recipes/quickstart.yaml
    """
    from zero2all.corpus.corpus_mistakes import corpus_mistakes
    from zero2all.recipe import load_recipe
    from zero2all.recipe.imported_code import imported_code
    from zero2all.recipe.named_plugins import plugin_mistakes, plugin_mistakes_without_import

    plugins = plugin_mistakes_without_import if no_import else plugin_mistakes
    checks = (corpus_mistakes, plugins, _initial_weights_mistakes, _vocabulary_mistakes)
    loaded = load_recipe(recipe, overrides, checks=checks)
    code, remark = imported_code(loaded), _vocabulary_remark(loaded)
    lines = [f"{recipe} is valid", *(["it imports:"] if code else []), *(f"  {one}" for one in code)]
    remarks = [*([] if remark is None else [remark]), *loaded.model.layout_notes()]
    lines += [f"remark: {one}" for one in remarks]
    return Result({"recipe": str(recipe), "problems": [], "imports": code, "remarks": remarks}, "\n".join(lines))


def _vocabulary_mistakes(recipe: Recipe) -> Iterable[Mistake]:
    if recipe.model.vocab_size is None:
        return []  # the tokenizer's size, and that need not be read
    from zero2all.tokenizer.vocabulary_check import vocabulary_mistakes

    return vocabulary_mistakes(recipe)


def _vocabulary_remark(recipe: Recipe) -> str | None:
    if recipe.model.vocab_size is None:
        return None
    from zero2all.tokenizer.vocabulary_check import vocabulary_remark

    return vocabulary_remark(recipe)


def _initial_weights_mistakes(recipe: Recipe) -> Iterable[Mistake]:
    if recipe.train.init is None:
        return []  # nothing to read, so torch need not be imported
    from zero2all.train.initial_weights import initial_weights_mistakes

    return initial_weights_mistakes(recipe)


@app.command()
@command
def schema(json: Json = False) -> Result:
    """Print the JSON Schema of recipes, for editors.

    Example: z2a recipe schema > recipe.schema.json
    """
    from zero2all.recipe import recipe_schema

    text = recipe_schema()
    return Result(jsonlib.loads(text), text)
