"""Threads that run jobs, which may return more jobs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from zero2all.corpus.fetch.retry import Stopped

STOP_SECONDS = 2.0  # for threads to note what has arrived when the command is interrupted

# Recursive types need a name in quotes.
Job = Callable[[], "Iterable[Job]"]


def run_jobs(jobs: Iterable[Job], workers: int, stop: threading.Event) -> None:
    """Run all jobs, and first those that a job returns: what is begun is finished before more is begun.

    The first exception of a job sets ``stop`` and is raised. So does Ctrl-C; a thread that is waiting for a server is
    then left behind, and writes nothing more.
    """
    pool = _JobPool(jobs, stop)
    threads = [threading.Thread(target=pool.work, name="z2a-fetch", daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        pool.ended.wait()
    except BaseException:
        pool.stop_all()
        raise
    finally:
        deadline = time.monotonic() + STOP_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    if pool.error is not None:
        raise pool.error


class _JobPool:
    def __init__(self, jobs: Iterable[Job], stop: threading.Event) -> None:
        self._waiting = deque(jobs)
        self._stop = stop
        self._changed = threading.Condition()
        self._active = 0
        self.error: BaseException | None = None
        self.ended = threading.Event()
        if not self._waiting:
            self.ended.set()

    def work(self) -> None:
        while (job := self._take()) is not None:
            more: list[Job] = []
            try:
                more = list(job())
            except Stopped:
                pass
            except BaseException as error:
                self.error = self.error or error
                self.stop_all()
            self._put_back(more)

    def stop_all(self) -> None:
        self._stop.set()
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()
            self.ended.set()

    def _take(self) -> Job | None:
        with self._changed:
            while not self._waiting and self._active and not self._stop.is_set():
                self._changed.wait()
            if not self._waiting or self._stop.is_set():
                return None
            self._active += 1
            return self._waiting.popleft()

    def _put_back(self, more: list[Job]) -> None:
        with self._changed:
            self._active -= 1
            if not self._stop.is_set():
                self._waiting.extendleft(reversed(more))
            if not self._waiting and not self._active:
                self.ended.set()
            self._changed.notify_all()
