"""The code outside of the package that a recipe names, found without importing it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.machinery import PathFinder

from zero2all.base.plugins import plugin_place, split_spec
from zero2all.recipe.named_plugins import named_plugins
from zero2all.recipe.sections import Recipe


@dataclass(frozen=True)
class ImportedCode:
    key: str
    """The key of the recipe that names it."""
    name: str
    """``package.module:attribute``, or the name of an installed plugin."""
    file: str | None
    """Where the module is; None if it is not installed."""

    def __str__(self) -> str:
        return f"{self.key}: {self.name} ({self.file or 'not found'})"


def imported_code(recipe: Recipe) -> list[ImportedCode]:
    """Everything that working with the recipe would import because the recipe names it."""
    return [
        ImportedCode(key, name, find_module(place.partition(":")[0]))
        for key, kind, spec in named_plugins(recipe)
        for name in [split_spec(spec)[0]]
        if (place := plugin_place(kind, name)) is not None
    ]


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
