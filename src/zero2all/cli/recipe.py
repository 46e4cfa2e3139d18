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
    sources must exist; URLs are not looked up. The weights of train.init must be of the recipe's model. The code that
    the recipe names (track.sinks, train.objective.grpo.rewards) is listed with its files. Warns where the parallel
    layout changes losses by more than rounding.

    Example: z2a recipe check recipes/quickstart.yaml
    """
    from zero2all.corpus.corpus_mistakes import corpus_mistakes
    from zero2all.recipe import load_recipe
    from zero2all.recipe.imported_code import imported_code
    from zero2all.recipe.layout_notes import layout_notes
    from zero2all.track.sinks import sink_mistakes

    importing = () if no_import else (sink_mistakes, _reward_mistakes)
    loaded = load_recipe(recipe, overrides, checks=(corpus_mistakes, *importing, _initial_weights_mistakes))
    code, notes = imported_code(loaded), list(layout_notes(loaded))
    lines = [f"{recipe} is valid", *(f"warning: {note}" for note in notes)]
    lines += [*(["it imports:"] if code else []), *(f"  {one}" for one in code)]
    return Result({"recipe": str(recipe), "problems": [], "warnings": notes, "imports": code}, "\n".join(lines))


def _reward_mistakes(recipe: Recipe) -> Iterable[Mistake]:
    if not recipe.train.objective.grpo.rewards:
        return []
    from zero2all.train.rollouts import reward_mistakes

    return reward_mistakes(recipe)


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
