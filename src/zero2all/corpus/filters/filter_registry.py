"""What a filter is, how it is named and given options, and how a list of them is applied to one document.

A filter is a pure function of one document and its options, written as keyword parameters with defaults::

    @register("filter", "too_short")
    def too_short(document: Document, *, min_chars: int = 50) -> FilterResult:
        return KEEP if len(document.content) >= min_chars else Drop("too short")

A new filter is one new file in this package, which the registry finds (``zero2all.base.plugins``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from zero2all.base.plugins import BoundPlugin, PluginSpec, bind
from zero2all.corpus.document import Document


@dataclass(frozen=True)
class Keep:
    """The document stays as it is."""


@dataclass(frozen=True)
class Drop:
    """The document is dropped. The reason is one of a few fixed phrases, so that reasons can be counted."""

    reason: str


@dataclass(frozen=True)
class Change:
    """The document stays under its gid with this content; the note says in a few fixed words what was done."""

    content: str
    note: str


FilterResult = Keep | Drop | Change
KEEP = Keep()


@dataclass(frozen=True)
class FilterOutcome:
    """The result for a document: itself, maybe changed, or None with the filter that dropped it and why."""

    document: Document | None
    dropped_by: str = ""
    reason: str = ""
    changed_by: tuple[str, ...] = ()


def build_filters(specs: Iterable[PluginSpec]) -> list[BoundPlugin]:
    """Filters from a recipe: a name alone, or ``{"name": ..., option: value, ...}``."""
    return [bind("filter", spec) for spec in specs]


def apply_filters(filters: Sequence[BoundPlugin], document: Document) -> FilterOutcome:
    """Apply the filters to a document in order, up to the first that drops it."""
    changed_by: list[str] = []
    for one in filters:
        result = one(document)
        if isinstance(result, Drop):
            return FilterOutcome(None, one.name, result.reason, tuple(changed_by))
        if isinstance(result, Change) and result.content != document.content:
            changed_by.append(one.name)
            if not result.content.strip():
                return FilterOutcome(None, one.name, "nothing left", tuple(changed_by))
            document = replace(document, content=result.content)
    return FilterOutcome(document, changed_by=tuple(changed_by))
