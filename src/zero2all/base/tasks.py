"""Task execution in this process, in local worker processes or on a Ray cluster. Same functions, same results.

A task is a plain function over small data: paths, options, counts. Text is never sent between processes, because a
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
from functools import cache
from typing import Any, Literal, TypeVar

from zero2all.base.console import say
from zero2all.base.errors import Z2aError, need
from zero2all.base.processes import watch_parent

TaskResult = TypeVar("TaskResult")
RETRIES = 8  # of a task whose Ray node is lost
SHUTDOWN_SECONDS = 10.0  # for running tasks to end when the run is stopped


Fallback = Callable[[tuple[Any, ...]], tuple[Any, ...]]
"""Replaces the arguments of a task that killed its worker with arguments that do not."""


@dataclass(frozen=True)
class TaskEngine:
    """
    >>> TaskEngine().run(len, [("abc",), ("de",)])
    [3, 2]
    """

    kind: Literal["local", "ray"] = "local"
    workers: int = 1
    """Number of local processes; 1 runs everything in this process, which works in any script or notebook."""
    ray_address: str | None = None

    @property
    def in_process(self) -> bool:
        """Whether tasks may be closures over objects of this process, such as a progress bar."""
        return self.kind == "local" and self.workers == 1

    def run(
        self,
        function: Callable[..., TaskResult],
        tasks: Sequence[tuple[Any, ...]],
        on_done: Callable[[int], None] = lambda number: None,
        fallback: Fallback | None = None,
    ) -> list[TaskResult]:
        """Results in the order of the tasks; ``on_done(number)`` is called as each one ends, in any order.

        A local worker that dies is replaced, and its task is tried again. If that kills a worker of its own too, the
        task that ``fallback`` makes of it is run in its place; without ``fallback`` that is an error.
        """
        results: dict[int, TaskResult] = {}
        for number, result in self._run_unordered(function, tasks, fallback):
            results[number] = result
            on_done(number)
        return [results[number] for number in range(len(tasks))]

    def _run_unordered(
        self, function: Callable[..., TaskResult], tasks: Sequence[tuple[Any, ...]], fallback: Fallback | None
    ) -> Iterator[tuple[int, TaskResult]]:
        if self.kind == "ray":
            return _on_ray(function, tasks, self.ray_address)
        if self.in_process or len(tasks) <= 1 or not _start_pool(self.workers):
            return ((number, function(*task)) for number, task in enumerate(tasks))
        return _in_processes(function, tasks, self.workers, fallback)


def available_cores() -> int:
    """Cores that this process may use: in a container, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_pools: dict[int, ProcessPoolExecutor] = {}  # reused between calls: a worker takes a second to start


def shutdown_workers() -> None:
    """Shut down the local worker processes to free their memory; the next run starts new ones."""
    while _pools:
        _pools.popitem()[1].shutdown()


def _start_pool(workers: int) -> bool:
    """Start worker processes. False if there can be none: Linux without /dev/shm has no semaphores for them."""
    if workers not in _pools:
        # Spawned, not forked: threads of tokenizers or Arrow do not survive a fork.
        context = multiprocessing.get_context("spawn")
        try:
            _pools[workers] = ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare_worker)
        except (OSError, NotImplementedError) as error:
            _say_no_workers(str(error))
            return False
    return True


@cache
def _say_no_workers(reason: str) -> None:
    """Say it only once: a stage runs many lists of tasks."""
    say(f"no worker processes: {reason}; one process does all the work, which takes longer")


def _in_processes(
    function: Callable[..., TaskResult], tasks: Sequence[tuple[Any, ...]], workers: int, fallback: Fallback | None
) -> Iterator[tuple[int, TaskResult]]:
    left, losses = dict(enumerate(tasks)), 0
    while left:
        try:
            yield from _in_pool(function, left, workers)
        except BrokenProcessPool:
            losses += 1
            say("a worker process was killed, perhaps because memory ran out; what it was doing is tried again")
            if losses > 1:  # by a task that was running or about to
                for number in list(left)[: 2 * workers + 1]:
                    yield number, _run_alone(function, left.pop(number), fallback)


def _in_pool(
    function: Callable[..., TaskResult], left: dict[int, tuple[Any, ...]], workers: int
) -> Iterator[tuple[int, TaskResult]]:
    """Tasks that have ended are removed from ``left``. A worker that dies takes the pool with it."""
    if not _start_pool(workers):
        for number in list(left):
            yield number, function(*left.pop(number))
        return
    pool = _pools[workers]
    try:
        futures = {pool.submit(function, *task): number for number, task in left.items()}
        for future in as_completed(futures):
            result = future.result()
            del left[futures[future]]
            yield futures[future], result
    except BaseException:
        del _pools[workers]
        _stop_pool(pool)
        raise


def _run_alone(function: Callable[..., TaskResult], task: tuple[Any, ...], fallback: Fallback | None) -> TaskResult:
    """Run a task in a process that nothing else can end."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_prepare_worker) as pool:
        try:
            return pool.submit(function, *task).result()
        except BrokenProcessPool as error:
            if fallback is not None:
                return function(*fallback(task))
            raise Z2aError(
                "a worker process was killed again and again, perhaps because memory ran out: finished parts are kept, "
                "so run the same command again, with fewer --workers if it repeats"
            ) from error


def _stop_pool(pool: ProcessPoolExecutor) -> None:
    """Cancel pending tasks; running ones get time to end, and their output is complete or absent."""
    processes = list(pool._processes.values())  # a pool that is shut down forgets them
    pool.shutdown(wait=False, cancel_futures=True)
    deadline = time.monotonic() + SHUTDOWN_SECONDS
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:  # also if a second Ctrl-C interrupts the wait
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _prepare_worker() -> None:
    watch_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle


def _on_ray(
    function: Callable[..., TaskResult], tasks: Sequence[tuple[Any, ...]], address: str | None
) -> Iterator[tuple[int, TaskResult]]:
    """A task whose node is lost is retried elsewhere. Its output is a file that is complete or absent, so a task that
    had ended, or still runs on a disconnected node, does no harm."""
    ray = need("ray", "ray")
    _join_cluster(ray, address)
    remote = ray.remote(function).options(num_cpus=1, max_retries=RETRIES)
    waiting = list(enumerate(tasks))[::-1]
    running: dict[Any, int] = {}
    while waiting or running:
        # One core stays free: a cluster whose every core waits for a task cannot start the next one. Queried each
        # time, because nodes come and go.
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
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage data leaves the machine
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
