"""A bounded queue and the thread that drains it: a slow or failing consumer cannot stop or slow the producer.

The producer never waits for a disk or a network and never sees an error. A failure is logged once when it begins and
once when it is over; dropped items are counted and logged on close.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from zero2all.console import warn

QUEUE_CAPACITY = 20_000
BATCH_LINES = 1_000
POLL_SECONDS = 0.1  # between two polls of the queue
RETRY_SECONDS = 1.0
CLOSE_TIMEOUT = 20.0  # seconds that the end of a run waits for a slow disk or service


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
        retry: bool = False,
        capacity: int = QUEUE_CAPACITY,
        every: float = POLL_SECONDS,
    ) -> None:
        self.name, self.dropped, self._every = name, 0, every
        self._deliver, self._finish, self._retry, self._capacity = deliver, finish, retry, capacity
        self._batch_lines = BATCH_LINES if retry else 1
        self._queue: deque[Any] = deque()
        self._enqueued = self._delivered = 0
        self._lock = threading.Lock()  # never held over anything slow
        self._failure: str | None = None
        self._warned: set[str] = set()
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
            self._warn_once("full", f"{self.name} does not keep up; lines are dropped until it does")

    def flush(self, timeout: float = CLOSE_TIMEOUT) -> bool:
        """Wait until every queued item is delivered. Returns False at once while deliveries fail."""
        target, until = self._enqueued, time.monotonic() + timeout
        self._wake.set()
        while self._delivered < target:
            if self._failure is not None or not self._thread.is_alive() or time.monotonic() > until:
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
            warn(f"{self.name}: {lost} lines are lost ({self._failure or 'it was too slow'})")

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
            self._note_failure(error)

    def _drain(self) -> bool:
        while self._queue:
            batch = [self._queue[number] for number in range(min(len(self._queue), self._batch_lines))]
            try:
                self._deliver(batch)
            except Exception as error:  # whatever fails here, training continues
                self._note_failure(error)
                if self._retry:
                    return False
                self.dropped += len(batch)
            else:
                self._note_recovery()
            for _ in batch:
                self._queue.popleft()
            self._delivered += len(batch)
        return True

    def _note_failure(self, error: Exception) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        waiting = "its lines wait in memory" if self._retry else "its lines are lost"
        self._warn_once("fails", f"{self.name} fails ({self._failure}); training continues, {waiting}")

    def _note_recovery(self) -> None:
        if self._failure is not None:
            self._failure = None
            self._warn_once("works", f"{self.name} works again")

    def _warn_once(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warn(message)
