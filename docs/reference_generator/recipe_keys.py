"""All keys of a recipe, from the types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from zero2all.recipe.types import Section


class Key(NamedTuple):
    path: str
    hint: Any
    """Its type with all annotations."""
    info: FieldInfo


def keys(section: type[Section], prefix: str) -> Iterator[Key]:
    hints = get_type_hints(section, include_extras=True)
    for name, info in section.model_fields.items():
        yield Key(f"{prefix}.{name}" if prefix else name, hints[name], info)


def sections(section: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    """All sections below one, each before those inside it."""
    for key in keys(section, prefix):
        if found := section_in(key.hint):
            path = key.path + ("[]" if get_origin(key.hint) is list else "")
            yield path, found
            yield from sections(found, path)


def section_in(hint: Any) -> type[Section] | None:
    if isinstance(hint, type) and issubclass(hint, Section):
        return hint
    return next((found for part in get_args(hint) if (found := section_in(part))), None)
