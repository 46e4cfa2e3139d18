"""Jobs in threads that do not outlive the command."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from zero2all.http_client import Stopped

STOP_SECONDS = 2.0  # for threads to note what has arrived when the command is interrupted


def run_all(jobs: Iterable[Callable[[], None]], workers: int, stop: threading.Event) -> None:
    """Run all jobs. The first exception of a job sets ``stop`` and is raised, and so does Ctrl-C.

    A thread that is waiting for a server is then left behind, which no executor of the standard library does.
    """
    waiting, errors = deque(jobs), list[BaseException]()

    def work() -> None:
        while not stop.is_set():
            try:
                job = waiting.popleft()
            except IndexError:
                return
            try:
                job()
            except Stopped:
                return
            except BaseException as error:
                errors.append(error)
                stop.set()

    threads = [threading.Thread(target=work, name="z2a-fetch", daemon=True) for _ in range(min(workers, len(waiting)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive() and not stop.is_set():
                thread.join(0.1)
    except BaseException:
        stop.set()
        raise
    finally:
        deadline = time.monotonic() + STOP_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
