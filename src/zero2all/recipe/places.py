"""Where the values of a recipe were given: in a line of the file, or on the command line."""

from __future__ import annotations

from zero2all.errors import RecipeProblem
from zero2all.recipe.safe_yaml import KeyPath
from zero2all.redact import redact

MAX_SHOWN_CHARS = 80  # characters of a wrong value or an override in a message
Places = dict[KeyPath, int | str]
"""The line of each key and element in the file, or the override that gave it."""


def override_place(places: Places, path: KeyPath, override: str) -> Places:
    """The places with an override at ``path``: what the file has there no longer counts."""
    return {other: place for other, place in places.items() if other[: len(path)] != path} | {path: shorten(override)}


def locate(places: Places, path: KeyPath) -> int | str | None:
    """The place of a value, or of the nearest section around it that has one."""
    return next((places[path[:end]] for end in range(len(path), 0, -1) if path[:end] in places), None)


def shorten(text: str) -> str:
    """For a message. Secrets go first: half of one would not be recognized."""
    text = redact(text)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def located_problem(path: KeyPath, message: str, hint: str = "", place: int | str | None = None) -> RecipeProblem:
    dotted = ".".join(map(str, path)) or "recipe"
    if isinstance(place, str):
        return RecipeProblem(dotted, message, hint, override=place)
    return RecipeProblem(dotted, message, hint, place)
