"""Sinks: other trackers that receive the same metrics. Each runs on its own thread, and its failures stay there.

``track.sinks`` in a recipe names them: ``tensorboard``, ``wandb``, or ``package.module:Class`` for your own, which is
instantiated with the run directory. Only a class with the methods of ``Sink`` is accepted: any other name is rejected
before it is called.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from zero2all.errors import UsageError, Z2aError, need
from zero2all.recipe import Mistake, Recipe
from zero2all.track.record_lines import EventLine, HistogramLine, RecordLine, SampleLine, StepLine


class Sink(Protocol):
    """The interface of a tracker. It may raise and it may be slow."""

    def step(self, step: int, values: dict[str, float]) -> None: ...

    def event(self, name: str, details: dict[str, Any]) -> None: ...

    def sample(self, step: int, name: str, text: str) -> None: ...

    def histogram(self, step: int, name: str, counts: list[float], edges: list[float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files that ``tensorboard --logdir`` reads."""

    def __init__(self, directory: Path) -> None:
        need("tensorboard", "track")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory / "tensorboard"))

    def step(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def event(self, name: str, details: dict[str, Any]) -> None:
        self._writer.add_text(f"events/{name}", str(details), details.get("step", 0))
        self._writer.flush()

    def sample(self, step: int, name: str, text: str) -> None:
        indented = "\n".join("    " + line for line in text.splitlines())  # as code: TensorBoard reads Markdown
        self._writer.add_text(f"samples/{name}", indented, step)

    def histogram(self, step: int, name: str, counts: list[float], edges: list[float]) -> None:
        centers = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
        total = sum(counts)
        self._writer.add_histogram_raw(
            name, edges[0], edges[-1], total,
            sum(count * center for count, center in zip(counts, centers, strict=True)),
            sum(count * center**2 for count, center in zip(counts, centers, strict=True)),
            edges[1:], counts, step,
        )  # fmt: skip

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases. Offline unless WANDB_MODE is set; ``wandb sync`` uploads the run."""

    def __init__(self, directory: Path) -> None:
        self._wandb: Any = need("wandb", "wandb")
        self._directory = directory

    @cached_property
    def _run(self) -> Any:
        """Created at the first line, on the sink's thread: it may wait for a server."""
        name, mode = self._directory.parent.name, os.environ.get("WANDB_MODE", "offline")
        return self._wandb.init(project="zero2all", name=name, dir=str(self._directory), mode=mode)

    def step(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def event(self, name: str, details: dict[str, Any]) -> None:
        self._run.log({f"events/{name}": str(details)}, commit=False)  # logged with the next step

    def sample(self, step: int, name: str, text: str) -> None:
        self._run.log({f"samples/{name}": text}, step=step)

    def histogram(self, step: int, name: str, counts: list[float], edges: list[float]) -> None:
        self._run.log({name: self._wandb.Histogram(np_histogram=(counts, edges))}, step=step)

    def close(self) -> None:
        self._run.finish()


BUILTIN_SINKS: dict[str, type[Sink]] = {"tensorboard": TensorBoard, "wandb": Wandb}
SINK_METHODS = ("step", "event", "sample", "histogram", "close")


def open_sinks(names: Iterable[str], directory: Path) -> list[Sink]:
    """The sinks that a recipe asks for. A missing package is an error before training, never during it."""
    return [_create_sink(name, directory) for name in names]


def sink_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """What is wrong with the sinks that a recipe names. Their modules are imported; nothing is instantiated."""
    for number, name in enumerate(recipe.track.sinks):
        try:
            _sink_class(name)
        except UsageError as error:
            yield Mistake(str(error), (f"track.sinks.{number}",))


def _create_sink(name: str, directory: Path) -> Sink:
    try:
        create: Callable[[Path], Sink] = _sink_class(name)
        return create(directory)
    except UsageError as error:
        raise UsageError(f"track.sinks: {error}") from error
    except Z2aError:
        raise
    except Exception as error:
        raise Z2aError(f"track.sinks: {name} does not start ({type(error).__name__}: {error})") from error


def _sink_class(name: str) -> type[Sink]:
    """The class behind a name, validated before it is called: a recipe must not be able to call arbitrary functions."""
    if name in BUILTIN_SINKS:
        return BUILTIN_SINKS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UsageError(f"no sink {name!r}; there are {', '.join(BUILTIN_SINKS)}, or package.module:Class")
    try:
        target: Any = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # importing runs the module's code
        raise UsageError(f"{name} cannot be loaded ({type(error).__name__}: {error})") from error
    if not isinstance(target, type):
        raise UsageError(f"{name} is not a class: write a class with the methods {', '.join(SINK_METHODS)}")
    missing = [method for method in SINK_METHODS if not callable(getattr(target, method, None))]
    if missing:
        raise UsageError(f"{name} is not a sink: it has no method {', '.join(missing)}")
    if inspect.isabstract(target) or getattr(target, "_is_protocol", False):
        raise UsageError(f"{name} is abstract: name a class that implements {', '.join(SINK_METHODS)}")
    _check_arguments(name, target)
    return target


def _check_arguments(name: str, sink_class: type) -> None:
    """Each method must accept the arguments it is called with."""
    if not _accepts_arguments(sink_class, 1):
        raise UsageError(f"{name} must be created with one argument, the run directory")
    for method in SINK_METHODS:
        expected = list(inspect.signature(getattr(Sink, method)).parameters)[1:]
        is_bound = isinstance(inspect.getattr_static(sink_class, method), classmethod | staticmethod)
        if not _accepts_arguments(getattr(sink_class, method), len(expected) + (not is_bound)):
            raise UsageError(f"{name}.{method} must take the arguments {method}({', '.join(expected)})")


def _accepts_arguments(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a compiled function without a signature
        return True
    return True


def sink_writer(sink: Sink) -> Callable[[list[RecordLine]], None]:
    """A function that passes record lines to a sink's methods."""

    def deliver(lines: list[RecordLine]) -> None:
        for line in lines:
            match line:
                case EventLine():
                    sink.event(line.event, {"time": line.time, **line.details})
                case SampleLine():
                    sink.sample(line.step, line.sample, line.text)
                case HistogramLine():
                    sink.histogram(line.step, line.histogram, line.counts, line.edges)
                case StepLine():
                    sink.step(line.step, line.metrics)

    return deliver
