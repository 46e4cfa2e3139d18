"""Start ranks as processes of this machine and collect what each returns: for tests and for the parity table."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, cast

from zero2all.base.console import warn
from zero2all.base.errors import Z2aError
from zero2all.base.processes import watch_parent

Backend = Literal["gloo", "nccl"]
# Imported once, in the process that ranks are forked from: in each of them it would take seconds. That process computes
# nothing, so it has no threads and no CUDA context that a fork would break.
PRELOADED = ["zero2all.train.trainer", "zero2all.evals", __name__]  # with torch.distributed, FSDP and DCP
GRACE_SECONDS = 2.0  # for the last messages of ranks after one has failed


class RankCrashError(Z2aError):
    """A rank ended without a Python exception: native code crashed, or something killed it."""


def run_ranks(
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    seconds: float = 120,
    detail: bool = False,
    backend: Backend = "gloo",
) -> list[Any]:
    """``function(*args)`` in ``ranks`` processes that share a process group; their results in the order of ranks.

    The first rank to fail ends all of them, and its traceback is in the error; so does the time limit. With ``detail``
    torch checks that all ranks call the same collective with the same shapes: gloo silently reduces mismatched ones.
    """
    [results] = stream_ranks(ranks, _yield_result, function, *args, seconds=seconds, detail=detail, backend=backend)
    return results


def stream_ranks(
    ranks: int,
    function: Callable[..., Iterator[Any]],
    *args: Any,
    seconds: float = 120,
    detail: bool = False,
    backend: Backend = "gloo",
) -> Iterator[list[Any]]:
    """Like :func:`run_ranks`, for a generator: yield the first value of every rank once all have it, and so on."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # Pickled here: multiprocessing would send every tensor as a file descriptor, and a fork server takes 253 of them.
    call = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory() as directory:
        processes, pipes = [], []
        for rank in range(ranks):
            receive, send = context.Pipe(duplex=False)
            job = _RankJob(rank, ranks, Path(directory), seconds, detail, backend, dict(os.environ), call)
            processes.append(context.Process(target=_rank_main, args=(job, send), daemon=True))
            processes[-1].start()
            send.close()
            pipes.append(receive)
        patience = 0.0  # where one has failed, time is up or the caller stops, the others are of no use
        try:
            yield from _collect(pipes, time.monotonic() + seconds)
            patience = 10.0
        finally:
            deadline = time.monotonic() + patience
            for process in processes:
                process.join(timeout=max(0.0, deadline - time.monotonic()))
                process.kill()
                process.join()


def stream_jobs(
    ranks: int, function: Callable[..., Iterator[Any]], jobs: Sequence[Any], *args: Any, seconds: float, detail: bool
) -> Iterator[list[Any]]:
    """Run ``function(jobs, *args)`` on ranks; it yields a value for each job, in order.

    After a crash of native code the jobs without a value are repeated once, in new processes: gloo's event loop
    in torch 2.13 has been seen to crash after dozens of process groups.
    """
    done = 0
    try:
        for values in stream_ranks(ranks, function, jobs, *args, seconds=seconds, detail=detail):
            done += 1
            yield values
    except RankCrashError as error:
        warn(f"{error}; new processes repeat {len(jobs) - done} of {len(jobs)} runs")
        yield from stream_ranks(ranks, function, jobs[done:], *args, seconds=seconds, detail=detail)


def _yield_result(function: Callable[..., Any], *args: Any) -> Iterator[Any]:
    yield function(*args)


def _collect(pipes: list[Connection], deadline: float) -> Iterator[list[Any]]:
    values: list[deque[Any]] = [deque() for _ in pipes]
    working = {pipe: rank for rank, pipe in enumerate(pipes)}

    def receive_message(pipe: Connection) -> Z2aError | None:
        """One message of a rank; the failure, if it reports one or is gone."""
        rank = working[pipe]
        try:
            kind, value = pickle.loads(pipe.recv_bytes())
        except EOFError:
            kind, value = "failed", None
        if kind == "value":
            values[rank].append(value)
            return None
        del working[pipe]
        if kind == "end":
            return None
        name = f"rank {rank} of {len(pipes)}"
        if value is None:
            return RankCrashError(f"{name} died without an error message")
        return Z2aError(f"{name} failed:\n{value}")

    failures: list[Z2aError] = []
    while working and not failures:
        ready = wait(list(working), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise Z2aError(f"ranks {sorted(working.values())} of {len(pipes)} did not end in time")
        failures = [failure for pipe in ready if (failure := receive_message(cast(Connection, pipe))) is not None]
        if failures:
            failures += _last_messages(working, receive_message)
        while all(values):
            yield [own.popleft() for own in values]
    if failures:  # where a rank died, what the others report follows from it
        raise next((failure for failure in failures if isinstance(failure, RankCrashError)), failures[0])


def _last_messages(working: dict[Connection, int], receive: Callable[[Connection], Z2aError | None]) -> list[Z2aError]:
    """Failures of the other ranks: what they had sent before is not lost with it, and a rank that died may be seen a
    moment after those that waited for it."""
    failures, deadline = [], time.monotonic() + GRACE_SECONDS
    while ready := wait(list(working), timeout=max(0.0, deadline - time.monotonic())):
        failures += [failure for pipe in ready if (failure := receive(cast(Connection, pipe))) is not None]
    return failures


@dataclass(frozen=True)
class _RankJob:
    """What a process needs to be a rank."""

    rank: int
    ranks: int
    directory: Path
    seconds: float
    detail: bool
    backend: Backend
    environment: dict[str, str]
    call: bytes
    """The pickled function with its arguments."""


def _rank_main(job: _RankJob, send: Connection) -> None:
    watch_parent()
    gc.freeze()  # what was imported before the fork: a collection would only copy its pages
    os.environ.clear()  # of the first call
    os.environ.update(job.environment)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # nothing leaves this machine
    import torch
    import torch.distributed as dist

    from zero2all.base.torch_private import DebugLevel, FileStore, set_debug_level

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.ranks))
    if job.detail:
        set_debug_level(DebugLevel.DETAIL)

    def send_message(kind: str, value: Any) -> None:
        # Pickled here: multiprocessing would send tensors as handles that end with this process.
        send.send_bytes(pickle.dumps((kind, value)))

    try:
        store = FileStore(str(job.directory / "store"), job.ranks)
        if job.backend == "nccl":
            torch.cuda.set_device(job.rank)
        limit = timedelta(seconds=job.seconds)
        dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=job.ranks, timeout=limit)
        function, args = pickle.loads(job.call)
        for value in function(*args):
            send_message("value", value)
    except BaseException:
        send_message("failed", traceback.format_exc())
    else:
        send_message("end", None)
        dist.barrier()  # a rank that leaves early looks like a failure to the others
        dist.destroy_process_group()
