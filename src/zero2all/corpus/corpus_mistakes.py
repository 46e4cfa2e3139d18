"""What ``z2a corpus build`` would refuse before it reads any text, as mistakes of the recipe."""

from __future__ import annotations

from collections.abc import Iterator

from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.plugins import bind, spec_problems, split_spec
from zero2all.corpus.filters.quality_classifier import QUALITY_FILTER, filter_checksums
from zero2all.corpus.mapping import resolve_mapping
from zero2all.corpus.readers.listing import path_problem
from zero2all.recipe import Mistake, Recipe


def corpus_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """Paths that do not exist, also of test sets, unknown field mappings, missing models of filters."""
    for number, source in enumerate(recipe.corpus.sources):
        key = f"corpus.sources.{number}"
        yield from _path_mistakes(f"{key}.paths", source.paths, follow_links=source.follow_links)
        try:
            resolve_mapping(source)
        except UsageError as error:
            yield Mistake(str(error), (key,))
    yield from _path_mistakes("corpus.decontaminate", recipe.corpus.decontaminate, follow_links=True)
    for name, path in recipe.evals.test_sets.items():
        if (problem := path_problem(path, follow_links=True)) is not None:
            yield Mistake(problem, (f"evals.test_sets.{name}",))
    for number, spec in enumerate(recipe.corpus.filters or []):
        if split_spec(spec)[0] == QUALITY_FILTER and not spec_problems("filter", spec):
            try:
                filter_checksums([bind("filter", spec)])
            except Z2aError as error:
                yield Mistake(str(error), (f"corpus.filters.{number}",))


def _path_mistakes(key: str, paths: list[str], *, follow_links: bool) -> Iterator[Mistake]:
    for number, path in enumerate(paths):
        if (problem := path_problem(path, follow_links=follow_links)) is not None:
            yield Mistake(problem, (f"{key}.{number}",))
