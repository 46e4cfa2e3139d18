"""The plugins that a recipe names, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator

from zero2all.base.errors import UsageError
from zero2all.base.plugins import find_plugin, is_builtin, name_problem, spec_problems, split_spec
from zero2all.recipe.features import NamedPlugin, feature_mistakes, listed_plugins, training_plugins
from zero2all.recipe.sections import Recipe
from zero2all.recipe.types import Mistake


def named_plugins(recipe: Recipe) -> Iterator[NamedPlugin]:
    """Every plugin that the recipe names, built-in ones too."""
    yield from listed_plugins("corpus.filters", "filter", recipe.corpus.filters or [])
    for number, source in enumerate(recipe.corpus.sources):
        if source.reader is not None:
            yield NamedPlugin(f"corpus.sources.{number}.reader", "reader", source.reader)
    yield from listed_plugins("evals.benchmarks", "task", recipe.evals.benchmarks)
    yield from run_plugins(recipe)


def run_plugins(recipe: Recipe) -> Iterator[NamedPlugin]:
    """The plugins that training uses."""
    yield from training_plugins(recipe.train)
    yield from listed_plugins("track.sinks", "sink", recipe.track.sinks)


def plugin_versions(recipe: Recipe) -> dict[str, str]:
    """The distribution and version of each plugin of training that is not built in, or the checksum of its file."""
    found = ((one.kind, split_spec(one.spec)[0]) for one in run_plugins(recipe))
    return {f"{kind} {name}": find_plugin(kind, name).source for kind, name in found if not is_builtin(kind, name)}


def require_run_plugins(recipe: Recipe, *, shards: bool) -> None:
    """Import what training uses. Raises an error with everything that is wrong with it."""
    problems = [problem for one in run_plugins(recipe) for problem in spec_problems(one.kind, one.spec)]
    mistakes = feature_mistakes(recipe.train, recipe.parallel, shards=shards)
    if problems := problems or [mistake.message for mistake in mistakes]:
        raise UsageError("; ".join(problems))


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
