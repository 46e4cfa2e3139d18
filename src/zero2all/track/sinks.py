"""Sinks: other trackers that receive the same metrics. Each runs on its own thread, and its failures stay there.

``AsyncWriter`` is that thread, with a bounded queue, also of the run record: the producer never waits for a disk or a
network and never sees an error. A failure is logged once when it begins and once when it is over. Dropped items are
counted and logged on close.

``track.sinks`` in a recipe names them. Each is a plugin (``zero2all.base.plugins``) that is instantiated with the run
directory. The built-in ones are in ``trackers/``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from zero2all.base.console import warn
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.plugins import PluginSpec, bind
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


def open_sinks(specs: Iterable[PluginSpec], directory: Path) -> list[Sink]:
    """The sinks that a recipe asks for. A missing package is an error before training, never during it."""
    return [_create_sink(spec, directory) for spec in specs]


def _create_sink(spec: PluginSpec, directory: Path) -> Sink:
    try:
        sink: Sink = bind("sink", spec)(directory)
    except UsageError as error:
        raise UsageError(f"track.sinks: {error}") from error
    except Z2aError:
        raise
    except Exception as error:
        raise Z2aError(f"track.sinks: {spec} does not start ({type(error).__name__}: {error})") from error
    return sink


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
