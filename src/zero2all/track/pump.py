"""A bounded queue and the thread that empties it: what happens on that side cannot stop or slow the side that fills it.

The one who puts an item never waits for a disk or a network and never sees an error. Trouble is said once when it
begins and once when it is over; what was lost is counted, and said at the end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from zero2all.console import warn

CAPACITY = 20_000
BATCH = 1_000
PAUSE = 0.1  # seconds between two looks at the queue
RETRY = 1.0
LAST_WORDS = 20.0  # seconds that the end of a run waits for a slow disk or service


class Pump:
    """Calls ``deliver(items)`` on a thread of its own.

    What raises is offered again if ``retry``, for a disk that may have room again; else it is lost, so that one item
    which a service does not take holds up no other. Items past the ``capacity`` are lost.
    """

    def __init__(
        self,
        name: str,
        deliver: Callable[[list[Any]], None],
        finish: Callable[[], None] = lambda: None,
        retry: bool = False,
        capacity: int = CAPACITY,
    ) -> None:
        self.name, self.lost = name, 0
        self._deliver, self._finish, self._retry, self._capacity = deliver, finish, retry, capacity
        self._batch = BATCH if retry else 1
        self._queue: deque[Any] = deque()
        self._put = self._done = 0
        self._lock = threading.Lock()  # never held over anything slow
        self._failure: str | None = None
        self._said: set[str] = set()
        self._closing, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"z2a-{name}", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        with self._lock:
            full = len(self._queue) >= self._capacity
            if full:
                self.lost += 1
            else:
                self._put += 1
                self._queue.append(item)
        if full:
            self._say("full", f"{self.name} does not keep up; lines are dropped until it does")

    def flush(self, timeout: float = LAST_WORDS) -> bool:
        """Wait until all that was put is delivered. While deliveries fail it is False at once."""
        target, until = self._put, time.monotonic() + timeout
        self._wake.set()
        while self._done < target:
            if self._failure is not None or not self._thread.is_alive() or time.monotonic() > until:
                return False
            time.sleep(0.001)
        return self.lost == 0

    @property
    def waiting(self) -> int:
        return self._put - self._done

    def close(self) -> None:
        self._closing.set()
        self._wake.set()
        self._thread.join(LAST_WORDS)
        lost = self.lost + len(self._queue)
        if lost:
            warn(f"{self.name}: {lost} lines are lost ({self._failure or 'it was too slow'})")

    def _run(self) -> None:
        while True:
            closing = self._closing.is_set()
            emptied = self._empty()
            if closing:
                break
            self._wake.wait(PAUSE if emptied else RETRY)
            self._wake.clear()
        try:
            self._finish()
        except Exception as error:
            self._fail(error)

    def _empty(self) -> bool:
        while self._queue:
            batch = [self._queue[number] for number in range(min(len(self._queue), self._batch))]
            try:
                self._deliver(batch)
            except Exception as error:  # whatever goes wrong here, training goes on
                self._fail(error)
                if self._retry:
                    return False
                self.lost += len(batch)
            else:
                self._recover()
            for _ in batch:
                self._queue.popleft()
            self._done += len(batch)
        return True

    def _fail(self, error: Exception) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        waiting = "its lines wait in memory" if self._retry else "its lines are lost"
        self._say("fails", f"{self.name} fails ({self._failure}); training goes on, {waiting}")

    def _recover(self) -> None:
        if self._failure is not None:
            self._failure = None
            self._say("works", f"{self.name} works again")

    def _say(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warn(message)
