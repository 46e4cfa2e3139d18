"""The plugins that a recipe names, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zero2all.base.plugins import PluginSpec, is_builtin, name_problem, spec_problems, split_spec
from zero2all.recipe.sections import Recipe
from zero2all.recipe.types import Mistake


class NamedPlugin(NamedTuple):
    key: str
    kind: str
    spec: PluginSpec


def named_plugins(recipe: Recipe) -> Iterator[NamedPlugin]:
    """Every plugin that the recipe names, built-in ones too."""
    lists = (
        ("corpus.filters", "filter", recipe.corpus.filters or []),
        ("track.sinks", "sink", recipe.track.sinks),
        ("train.objective.grpo.rewards", "reward", recipe.train.objective.grpo.rewards),
    )
    for key, kind, specs in lists:
        yield from (NamedPlugin(f"{key}.{number}", kind, spec) for number, spec in enumerate(specs))


def plugin_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """What is wrong with names and options. The modules of the named plugins are imported; nothing is called."""
    for key, kind, spec in named_plugins(recipe):
        for problem in spec_problems(kind, spec):
            yield Mistake(problem, (key,))


def plugin_mistakes_without_import(recipe: Recipe) -> Iterator[Mistake]:
    """The same for built-in plugins. Of all others, only whether there is one with the name."""
    for key, kind, spec in named_plugins(recipe):
        name, _ = split_spec(spec)
        if is_builtin(kind, name):
            yield from (Mistake(problem, (key,)) for problem in spec_problems(kind, spec))
        elif (problem := name_problem(kind, name)) is not None:
            yield Mistake(problem, (key,))
