"""The registry of everything that can be added: built in, from an installed distribution, or named in a recipe.

A plugin is a function or a class under a name. Its keyword-only parameters are its options, checked by their types::

    @register("filter", "too_short")
    def too_short(document: Document, *, min_chars: int = 50) -> FilterResult: ...

The module of a built-in plugin is in the package that ``KINDS`` names. A distribution declares its own as entry points
in the group ``zero2all.filter``, and a recipe can name any other as ``package.module:Name``. A module outside of
zero2all is imported only when one of its plugins is used or validated.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from zero2all.base.errors import UsageError

API = 1
"""The version of the protocols of all kinds. A plugin for a different one is rejected."""
Feature = Literal[
    "sharded_parameters", "tensor_parallel", "pipeline_parallel", "context_parallel", "cpu_offload", "file_offload",
    "checkpoint_state",
]  # fmt: skip
"""What a plugin may have to support, because the recipe uses it."""
LAYOUTS: tuple[Feature, ...] = ("sharded_parameters", "tensor_parallel", "pipeline_parallel", "context_parallel")
PluginSpec = str | dict[str, Any]
"""A plugin in a recipe: its name, or a mapping with ``name`` and options."""
_Target = TypeVar("_Target", bound=Callable[..., Any])


@dataclass(frozen=True)
class Kind:
    """What can be added in one way."""

    key: str
    """Where a recipe names it."""
    package: str
    """The package with the built-in ones."""
    methods: tuple[str, ...] = ()
    """The methods of its protocol; none if it is a function."""
    by_file: bool = True
    """Whether a module has one plugin, of the same name, so that no other module is imported for it."""


KINDS: dict[str, Kind] = {
    "filter": Kind("corpus.filters", "zero2all.corpus.filters", by_file=False),
    "reader": Kind("corpus.sources[].reader", "zero2all.corpus.readers", by_file=False),
    "task": Kind("evals.benchmarks", "zero2all.evals.bench.benchmarks", by_file=False),
    "optimizer": Kind(
        "train.optimizer", "zero2all.optim.optimizers", ("build", "learning_rate", "peak_lr", "state_bytes")
    ),
    "schedule": Kind("train.schedule", "zero2all.optim.schedules"),
    "objective": Kind("train.objective", "zero2all.train.objectives.registered", ("kinds", "conversations", "build")),
    "callback": Kind("train.callbacks", "zero2all.train.callbacks", ("before_step", "after_step", "at_end")),
    "reward": Kind("train.objective.grpo.rewards", "zero2all.train.objectives.rewards"),
    "sink": Kind("track.sinks", "zero2all.track.trackers", ("step", "event", "sample", "histogram", "close")),
}


@dataclass(frozen=True)
class Plugin:
    """A plugin as registered."""

    kind: str
    name: str
    target: Callable[..., Any]
    supports: frozenset[str] = frozenset()
    """Features that it works with."""
    api: int = API
    details: Mapping[str, Any] = field(default_factory=dict)
    """What a kind needs to know beside the function, such as the extensions of a reader's files."""
    distribution: str = ""
    version: str = ""

    @property
    def source(self) -> str:
        return " ".join(filter(None, (self.distribution, self.version)))

    @property
    def is_builtin(self) -> bool:
        return self.target.__module__.startswith("zero2all.")

    @property
    def help(self) -> str:
        return inspect.getdoc(self.target) or ""

    @property
    def options(self) -> type[BaseModel]:
        return _options_model(self.target)


@dataclass(frozen=True)
class BoundPlugin:
    """A plugin with all its options, defaults included. It can be sent to another process."""

    kind: str
    name: str
    target: Callable[..., Any] = field(repr=False)
    options: Mapping[str, Any]
    source: str = ""

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self.target(*arguments, **self.options)
        except Exception as error:
            self._add_note(error)
            raise

    def iterate(self, *arguments: Any) -> Iterator[Any]:
        """What the plugin yields."""
        with self.named():
            yield from self(*arguments)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name the plugin in the traceback of an exception."""
        try:
            yield
        except Exception as error:
            self._add_note(error)
            raise

    def guard(self, made: Any, *methods: str) -> None:
        """Make exceptions in these methods of an object that the plugin has made name it."""
        for name in methods if self.source else ():
            object.__setattr__(made, name, self.named()(getattr(made, name)))

    def _add_note(self, error: Exception) -> None:
        if self.source:  # built-in plugins are found by the traceback
            error.add_note(f"raised by the {self.kind} {self.name} of {self.source}")


_registered: dict[tuple[str, str], Plugin] = {}
_loaded: dict[tuple[str, str], Plugin] = {}


def register(
    kind: str, name: str, *, supports: Iterable[Feature] = (), api: int = API, **details: Any
) -> Callable[[_Target], _Target]:
    """Register a function or a class under ``name``. ``supports`` lists the features that it works with."""

    def decorate(target: _Target) -> _Target:
        if (kind, name) in _registered:
            raise ValueError(f"two {kind}s are called {name}")
        _registered[kind, name] = Plugin(kind, name, target, frozenset(supports), api, details)
        return target

    return decorate


def builtin_names(kind: str) -> list[str]:
    """The names of the built-in plugins. Their modules are imported only where one has several."""
    if KINDS[kind].by_file:
        return [name.replace("_", "-") for name in _modules(kind)]
    for name in _modules(kind):
        importlib.import_module(f"{KINDS[kind].package}.{name}")
    return [one.name for one in _registered.values() if one.kind == kind and one.is_builtin]


def builtin(kind: str) -> list[Plugin]:
    """The built-in plugins, whose modules are imported."""
    return [find_plugin(kind, name) for name in builtin_names(kind)]


@cache
def _modules(kind: str) -> list[str]:
    directory = Path(__file__).parents[1].joinpath(*KINDS[kind].package.split(".")[1:])
    return sorted(path.stem for path in directory.glob("[!_]*.py"))


@cache
def installed(kind: str) -> dict[str, metadata.EntryPoint]:
    """The plugins of installed distributions, none of which is imported."""
    return {one.name: one for one in metadata.entry_points(group=f"zero2all.{kind}")}


def is_builtin(kind: str, name: str) -> bool:
    return ":" not in name and name in builtin_names(kind)


def plugin_place(kind: str, name: str) -> str | None:
    """The ``module:attribute`` that a name outside of zero2all stands for; None for any other name."""
    if ":" in name:
        return name
    entry = None if is_builtin(kind, name) else installed(kind).get(name)
    return None if entry is None else entry.value


def name_problem(kind: str, name: str) -> str | None:
    """Why a recipe cannot name this, as far as it is known without importing a plugin."""
    if ":" in name or (kind, name) in _registered or is_builtin(kind, name) or name in installed(kind):
        return None
    return f"there is no {kind} {name!r}{_suggest(name, [*builtin_names(kind), *installed(kind)], 'module:Name')}"


def loaded_plugin(kind: str, name: str) -> Plugin | None:
    """A plugin that is built in, or whose module has been imported already."""
    return find_plugin(kind, name) if (kind, name) in _loaded or is_builtin(kind, name) else None


def find_plugin(kind: str, name: str) -> Plugin:
    """The plugin with a name, whose module is imported. Raises UsageError if there is none, or none that works."""
    if (kind, name) in _loaded:
        return _loaded[kind, name]
    if is_builtin(kind, name) and (kind, name) not in _registered:
        importlib.import_module(f"{KINDS[kind].package}.{name.replace('-', '_')}")
    if (kind, name) in _registered and name not in installed(kind):
        plugin = _registered[kind, name]
    elif problem := name_problem(kind, name):
        raise UsageError(problem)
    else:  # also if the module was imported for another plugin in it: the entry point knows the version
        plugin = _load(kind, name)
    if plugin.api != API:
        raise UsageError(
            f"{kind} {name} is for version {plugin.api} of the plugin API, and zero2all has version {API}: install a "
            f"release of {plugin.distribution or 'it'} for version {API}"
        )
    _require_protocol(plugin)
    _loaded[kind, name] = plugin
    return plugin


def _load(kind: str, name: str) -> Plugin:
    """A plugin of an installed distribution, or the attribute of a module."""
    entry = installed(kind).get(name)
    module, _, attribute = (entry.value if entry is not None else name).partition(":")
    try:
        target: Any = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # importing runs the module's code
        raise UsageError(f"{name} cannot be loaded ({type(error).__name__}: {error})") from error
    declared = next((one for one in _registered.values() if one.target is target), Plugin(kind, name, target))
    if entry is not None and entry.dist is not None:
        return replace(declared, name=name, distribution=entry.dist.name, version=entry.dist.version)
    return replace(declared, name=name, version=_checksum(module))


def _checksum(module: str) -> str:
    """A version for a file that has none."""
    file = getattr(sys.modules[module], "__file__", None)
    return "" if file is None else f"sha256:{hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]}"


def _require_protocol(plugin: Plugin) -> None:
    """Check a target before it is called: a recipe must not be able to call arbitrary functions."""
    target, methods = plugin.target, KINDS[plugin.kind].methods
    if not methods and not callable(target):
        raise UsageError(f"{plugin.name} is not a function")
    if methods and not isinstance(target, type):
        raise UsageError(f"{plugin.name} is not a class: write a class with the methods {', '.join(methods)}")
    if missing := [method for method in methods if not callable(getattr(target, method, None))]:
        raise UsageError(f"{plugin.name} is not a {plugin.kind}: it has no method {', '.join(missing)}")
    if inspect.isabstract(target) or getattr(target, "_is_protocol", False):
        raise UsageError(f"{plugin.name} is abstract: name a class that implements {', '.join(methods)}")


@cache
def _options_model(target: Callable[..., Any]) -> type[BaseModel]:
    parameters = [one for one in inspect.signature(target).parameters.values() if one.kind is one.KEYWORD_ONLY]
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    annotations = {one.name: Any if one.annotation is one.empty else one.annotation for one in parameters}
    hints = get_type_hints(SimpleNamespace(__annotations__=annotations), getattr(function, "__globals__", {}))
    fields: dict[str, Any] = {
        one.name: (hints[one.name], ... if one.default is one.empty else one.default) for one in parameters
    }
    return create_model(target.__name__, __config__=ConfigDict(extra="forbid"), **fields)


def split_spec(spec: PluginSpec) -> tuple[str, dict[str, Any]]:
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    return str(options.pop("name", "")), options


def spec_problems(kind: str, spec: PluginSpec) -> list[str]:
    """Everything that is wrong with the name and the options of a plugin."""
    name, given = split_spec(spec)
    try:
        model = find_plugin(kind, name).options
    except UsageError as error:
        return [str(error)]
    known = list(model.model_fields)
    unknown = [option for option in given if option not in known]
    problems = [f"{kind} {name} has no option {option!r}{_suggest(str(option), known)}" for option in unknown]
    try:
        model(**{option: value for option, value in given.items() if option in known})
    except ValidationError as error:
        for detail in error.errors():
            if not (unknown and detail["type"] == "missing"):  # an unknown one may be meant
                where = ".".join(str(part) for part in detail["loc"])
                problems.append(f"{kind} {name}, option {where}: {detail['msg']}")
    return problems


def bind(kind: str, spec: PluginSpec) -> BoundPlugin:
    """A plugin with its options, which can be called. Raises UsageError with all that is wrong."""
    if problems := spec_problems(kind, spec):
        raise UsageError("; ".join(problems))
    name, given = split_spec(spec)
    plugin = find_plugin(kind, name)
    options = plugin.options(**given)
    values = {option: getattr(options, option) for option in plugin.options.model_fields}
    return BoundPlugin(kind, name, plugin.target, values, plugin.source)


def _suggest(wrong: str, known: Iterable[str], form: str = "") -> str:
    names = sorted(known)
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(filter(None, (*names, form)))}" if names else "; it takes none"
