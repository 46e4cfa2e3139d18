"""Sinks: other trackers that receive the same metrics. Each runs on its own thread, and its failures stay there.

``AsyncWriter`` is that thread, with a bounded queue, also of the run record: the producer never waits for a disk or a
network and never sees an error. A failure is logged once when it begins and once when it is over. Dropped items are
counted and logged on close.

``track.sinks`` in a recipe names them: ``tensorboard``, ``wandb``, or ``package.module:Class`` for your own, which is
instantiated with the run directory. Only a class with the methods of ``Sink`` is accepted: any other name is rejected
before it is called.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from zero2all.base.console import warn
from zero2all.base.errors import UsageError, Z2aError, need
from zero2all.recipe import Mistake, Recipe
from zero2all.track.record_lines import EventLine, HistogramLine, RecordLine, SampleLine, StepLine

QUEUE_CAPACITY = 20_000
BATCH_LINES = 1_000
POLL_SECONDS = 0.1  # between two polls of the queue
RETRY_SECONDS = 1.0
CLOSE_TIMEOUT = 20.0  # seconds that the end of a run waits for a slow disk or service


class _Warnings:
    """Warns once when a writer begins to fail, once when it works again, and once when it does not keep up."""

    def __init__(self, name: str, fate: str) -> None:
        """``fate`` is what happens to the lines while the writer fails."""
        self.name, self.failure = name, ""
        self._fate = fate
        self._given: set[str] = set()

    def note_failure(self, error: Exception) -> None:
        self.failure = f"{type(error).__name__}: {error}"
        self._warn_once("fails", f"{self.name} fails ({self.failure}); training continues, its lines {self._fate}")

    def note_success(self) -> None:
        if self.failure:
            self.failure = ""
            self._warn_once("works", f"{self.name} works again")

    def note_full(self) -> None:
        self._warn_once("full", f"{self.name} does not keep up; lines are dropped until it does")

    def _warn_once(self, what: str, message: str) -> None:
        if what not in self._given:
            self._given.add(what)
            warn(message)


class AsyncWriter:
    """Calls ``deliver(items)`` on its own thread.

    With ``retry``, items whose delivery raises are delivered again: a full disk may have space later. Without it they
    are dropped, so that one item which a service rejects blocks no other. Items beyond ``capacity`` are dropped.
    ``every`` is the time between two deliveries, in seconds.
    """

    def __init__(
        self,
        name: str,
        deliver: Callable[[list[Any]], None],
        finish: Callable[[], None] = lambda: None,
        *,
        retry: bool = False,
        capacity: int = QUEUE_CAPACITY,
        every: float = POLL_SECONDS,
    ) -> None:
        self.dropped = 0
        self._deliver, self._finish, self._retry, self._capacity, self._every = deliver, finish, retry, capacity, every
        self._queue: deque[Any] = deque()
        self._enqueued = self._delivered = 0
        self._lock = threading.Lock()  # never held over anything slow
        self._warnings = _Warnings(name, "wait in memory" if retry else "are lost")
        self._closing, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"z2a-{name}", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        with self._lock:
            full = len(self._queue) >= self._capacity
            if full:
                self.dropped += 1
            else:
                self._enqueued += 1
                self._queue.append(item)
        if full:
            self._warnings.note_full()

    def flush(self, timeout: float = CLOSE_TIMEOUT) -> bool:
        """Wait until every queued item is delivered. Returns False at once while deliveries fail."""
        target, until = self._enqueued, time.monotonic() + timeout
        self._wake.set()
        while self._delivered < target:
            if self._warnings.failure or not self._thread.is_alive() or time.monotonic() > until:
                return False
            time.sleep(0.001)
        return self.dropped == 0

    @property
    def pending(self) -> int:
        return self._enqueued - self._delivered

    def close(self) -> None:
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT)
        lost = self.dropped + len(self._queue)
        if lost:
            warn(f"{self._warnings.name}: {lost} lines are lost ({self._warnings.failure or 'it was too slow'})")

    def _run(self) -> None:
        while True:
            closing = self._closing.is_set()
            drained = self._drain()
            if closing:
                break
            self._wake.wait(self._every if drained else RETRY_SECONDS)
            self._wake.clear()
        try:
            self._finish()
        except Exception as error:
            self._warnings.note_failure(error)

    def _drain(self) -> bool:
        most = BATCH_LINES if self._retry else 1
        while self._queue:
            batch = [self._queue[number] for number in range(min(len(self._queue), most))]
            try:
                self._deliver(batch)
            except Exception as error:  # whatever fails here, training continues
                self._warnings.note_failure(error)
                if self._retry:
                    return False
                self.dropped += len(batch)
            else:
                self._warnings.note_success()
            for _ in batch:
                self._queue.popleft()
            self._delivered += len(batch)
        return True


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
            name,
            edges[0],
            edges[-1],
            total,
            sum(count * center for count, center in zip(counts, centers, strict=True)),
            sum(count * center**2 for count, center in zip(counts, centers, strict=True)),
            edges[1:],
            counts,
            step,
        )

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
    return target


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
