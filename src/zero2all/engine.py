"""Where tasks run: here, in local processes, or on a Ray cluster. The same functions, the same results.

A task is a plain function over small data: paths, options, counts. Text never travels between processes, because a
pool that ships text is slower than one process; a task reads its input and writes its output itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from zero2all.errors import Z2aError, need
from zero2all.processes import watch_parent

Result = TypeVar("Result")
RETRIES = 8  # of a task whose Ray node is lost
FINISH = 10.0  # seconds that tasks have to end in when the run is stopped


@dataclass(frozen=True)
class Engine:
    """
    >>> Engine().run(len, [("abc",), ("de",)])
    [3, 2]
    """

    kind: Literal["local", "ray"] = "local"
    workers: int = 1
    """Local processes; 1 runs everything in this one, which any script or notebook can do."""
    ray_address: str | None = None

    @property
    def in_process(self) -> bool:
        """Whether tasks may be closures over things of this process, such as a progress bar."""
        return self.kind == "local" and self.workers == 1

    def run(
        self,
        function: Callable[..., Result],
        tasks: Sequence[tuple[Any, ...]],
        done: Callable[[int], None] = lambda number: None,
    ) -> list[Result]:
        """Results in the order of the tasks; ``done(number)`` is called as each one ends, in any order."""
        results: dict[int, Result] = {}
        for number, result in self._unordered(function, tasks):
            results[number] = result
            done(number)
        return [results[number] for number in range(len(tasks))]

    def _unordered(
        self, function: Callable[..., Result], tasks: Sequence[tuple[Any, ...]]
    ) -> Iterator[tuple[int, Result]]:
        if self.kind == "ray":
            return _on_ray(function, tasks, self.ray_address)
        if self.in_process or len(tasks) <= 1:
            return ((number, function(*task)) for number, task in enumerate(tasks))
        return _in_processes(function, tasks, self.workers)


def all_cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_pools: dict[int, ProcessPoolExecutor] = {}  # kept between calls: a worker takes a second to start


def end_workers() -> None:
    """Let the local processes go, and their memory with them; the next run starts new ones."""
    while _pools:
        _pools.popitem()[1].shutdown()


def _in_processes(
    function: Callable[..., Result], tasks: Sequence[tuple[Any, ...]], workers: int
) -> Iterator[tuple[int, Result]]:
    if workers not in _pools:
        # Spawned, not forked: threads of tokenizers or Arrow do not survive a fork.
        context = multiprocessing.get_context("spawn")
        _pools[workers] = ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare_worker)
    pool = _pools[workers]
    try:
        futures = {pool.submit(function, *task): number for number, task in enumerate(tasks)}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BaseException as error:
        del _pools[workers]
        _stop(pool)
        if isinstance(error, BrokenProcessPool):
            raise Z2aError(
                "a worker process was killed, perhaps for want of memory: finished parts are kept, "
                "so run the same command again, with fewer --workers if it repeats"
            ) from error
        raise


def _stop(pool: ProcessPoolExecutor) -> None:
    """Tasks that wait are not begun; those that run have a while to end, and what they write is whole or not there."""
    processes = list(pool._processes.values())  # a pool that is shut down forgets them
    pool.shutdown(wait=False, cancel_futures=True)
    deadline = time.monotonic() + FINISH
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:  # also where a second Ctrl-C ends the waiting
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _prepare_worker() -> None:
    watch_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle


def _on_ray(
    function: Callable[..., Result], tasks: Sequence[tuple[Any, ...]], address: str | None
) -> Iterator[tuple[int, Result]]:
    """A task whose node is lost is run again elsewhere. Its output is a file that is whole or not there, so a task that
    had ended, or still runs on a node that only the network lost, does no harm."""
    ray = need("ray", "ray")
    _join_cluster(ray, address)
    remote = ray.remote(function).options(num_cpus=1, max_retries=RETRIES)
    waiting = list(enumerate(tasks))[::-1]
    running: dict[Any, int] = {}
    while waiting or running:
        # One core stays free: a cluster whose every core waits for a task cannot start the next one. Asked each time,
        # because nodes come and go.
        at_once = max(1, int(ray.cluster_resources().get("CPU", 1)) - 1)
        while waiting and len(running) < at_once:
            number, task = waiting.pop()
            running[remote.remote(*task)] = number
        finished, _ = ray.wait(list(running), num_returns=1)
        for reference in finished:
            yield running.pop(reference), _ray_result(ray, reference)


def _join_cluster(ray: Any, address: str | None) -> None:
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing of a user's work is reported to anybody
    handler = signal.getsignal(signal.SIGTERM)
    try:
        # "local" starts a cluster of its own; None would join whatever ran here last.
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except ConnectionError as error:
        raise Z2aError(
            f"cannot join the Ray cluster at {address}: is it running ('ray start --head' prints its address), and are "
            "RAY_AUTH_MODE and RAY_AUTH_TOKEN here what they are on its nodes?"
        ) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray's own would end this process with another status


def _ray_result(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise Z2aError(
            f"the cluster lost a task {RETRIES + 1} times ({type(error).__name__}): finished parts are kept, so run "
            "the same command again, on machines with more memory if it repeats"
        ) from error
