"""What a filter is, how it is named and given options, and how a list of them is applied to one document.

A filter is a pure function of one document and its options, written as keyword parameters with defaults::

    @register_filter("too_short")
    def too_short(document: Document, *, min_chars: int = 50) -> FilterResult:
        return KEEP if len(document.content) >= min_chars else Drop("too short")

Every module of this package is imported when the package is, so a new filter is one new file.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from zero2all.base.errors import UsageError
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

FilterFunction = Callable[..., FilterResult]
_Function = TypeVar("_Function", bound=FilterFunction)


@dataclass(frozen=True)
class FilterInfo:
    """A filter as registered: its function and the model that checks its options."""

    name: str
    function: FilterFunction
    options: type[BaseModel]

    @property
    def help(self) -> str:
        return inspect.getdoc(self.function) or ""


@dataclass(frozen=True)
class BoundFilter:
    """A filter with all its options, defaults included. It can be sent to another process."""

    name: str
    function: FilterFunction = field(repr=False)
    options: Mapping[str, Any]

    def __call__(self, document: Document) -> FilterResult:
        return self.function(document, **self.options)


@dataclass(frozen=True)
class FilterOutcome:
    """The result for a document: itself, maybe changed, or None with the filter that dropped it and why."""

    document: Document | None
    dropped_by: str = ""
    reason: str = ""
    changed_by: tuple[str, ...] = ()


FILTERS: dict[str, FilterInfo] = {}


def register_filter(name: str) -> Callable[[_Function], _Function]:
    """Register a function under ``name``. Its keyword parameters are its options, checked by their types."""

    def register(function: _Function) -> _Function:
        if name in FILTERS:
            raise ValueError(f"two filters are called {name}")
        FILTERS[name] = FilterInfo(name, function, _options_model(name, function))
        return function

    return register


def _options_model(name: str, function: FilterFunction) -> type[BaseModel]:
    hints = get_type_hints(function)
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    model: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    return model


def build_filters(specs: Iterable[str | Mapping[str, Any]]) -> list[BoundFilter]:
    """Filters from a recipe: a name alone, or ``{"name": ..., option: value, ...}``."""
    return [_bind(spec) for spec in specs]


def filter_problems(spec: str | Mapping[str, Any]) -> list[str]:
    """Everything that is wrong with the name and the options of a filter."""
    name, given = _split_spec(spec)
    info = FILTERS.get(name)
    if info is None:
        return [f"there is no filter {name!r}{_suggest(name, FILTERS)}"]
    known = list(info.options.model_fields)
    unknown = [option for option in given if option not in known]
    problems = [f"filter {name} has no option {option!r}{_suggest(str(option), known)}" for option in unknown]
    try:
        info.options(**{option: value for option, value in given.items() if option in known})
    except ValidationError as error:
        for detail in error.errors():
            if not (unknown and detail["type"] == "missing"):  # an unknown one may be meant
                where = ".".join(str(part) for part in detail["loc"])
                problems.append(f"filter {name}, option {where}: {detail['msg']}")
    return problems


def _split_spec(spec: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    return str(options.pop("name", "")), options


def _bind(spec: str | Mapping[str, Any]) -> BoundFilter:
    if problems := filter_problems(spec):
        raise UsageError("; ".join(problems))
    name, given = _split_spec(spec)
    info = FILTERS[name]
    options = info.options(**given)
    return BoundFilter(name, info.function, {option: getattr(options, option) for option in info.options.model_fields})


def _suggest(wrong: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(names)}" if names else "; it takes none"


def apply_filters(filters: Sequence[BoundFilter], document: Document) -> FilterOutcome:
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
