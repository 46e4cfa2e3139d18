"""The code outside of the package that a recipe names, found without importing it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder

from zero2all.recipe.sections import Recipe


@dataclass(frozen=True)
class ImportedCode:
    key: str
    """The key of the recipe that names it."""
    name: str
    """``package.module:attribute``."""
    file: str | None
    """Where the module is; None if it is not installed."""

    def __str__(self) -> str:
        return f"{self.key}: {self.name} ({self.file or 'not found'})"


def imported_code(recipe: Recipe) -> list[ImportedCode]:
    """Everything that training with the recipe would import because the recipe names it."""
    return [ImportedCode(key, name, find_module(name.partition(":")[0])) for key, name in _named(recipe)]


def _named(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for number, name in enumerate(recipe.track.sinks):
        if ":" in name:  # the others are ours
            yield f"track.sinks.{number}", name
    for number, name in enumerate(recipe.train.objective.grpo.rewards):
        yield f"train.objective.grpo.rewards.{number}", name


def find_module(name: str) -> str | None:
    """The file of a module. ``importlib.util.find_spec`` would import the packages around it."""
    path, found = None, None
    for at, _ in enumerate(parts := name.split("."), start=1):
        try:
            spec = PathFinder.find_spec(".".join(parts[:at]), path)
        except (ImportError, ValueError):  # an empty name
            return None
        if spec is None:
            return None
        found, path = spec.origin, spec.submodule_search_locations
        if at < len(parts) and path is None:
            return None
    return found
