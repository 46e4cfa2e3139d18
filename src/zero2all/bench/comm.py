"""``z2a bench comm``: the bandwidth of each collective by message size."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zero2all.base.errors import UsageError
from zero2all.base.units import show_bytes
from zero2all.bench.measurements import Measurement, MeasurementReport, this_machine, wall_seconds
from zero2all.bench.rank_harness import Backend, run_ranks

P2P_VARIABLE = "NCCL_P2P_DISABLE"
MIN_SECONDS = 0.2  # of timed repeats of one size, after the first
MAX_REPEATS = 50
DEFAULT_SIZES = tuple(1 << power for power in (12, 16, 20, 24, 26))


@dataclass(frozen=True)
class Collective:
    """A collective, and the share of a message that each link of a ring carries (bus bandwidth of nccl-tests)."""

    name: str
    link_share: Callable[[int], float]
    """The share by number of ranks; the message is the larger of input and output."""
    run: Callable[[Tensor, Tensor, Tensor], object]
    """With a message, a buffer of its size, and a buffer for this rank's part of it."""


COLLECTIVES = (
    Collective("all-reduce", lambda n: 2 * (n - 1) / n, lambda data, buffer, part: dist.all_reduce(data)),
    Collective("all-gather", lambda n: (n - 1) / n, lambda data, buffer, part: dist.all_gather_single(buffer, part)),
    Collective(
        "reduce-scatter", lambda n: (n - 1) / n, lambda data, buffer, part: dist.reduce_scatter_single(part, data)
    ),
    Collective("all-to-all", lambda n: (n - 1) / n, lambda data, buffer, part: dist.all_to_all_single(buffer, data)),
    Collective("send and receive", lambda n: 1.0, lambda data, buffer, part: _pass_on(data, buffer)),
)


@dataclass(frozen=True)
class CollectiveTime:
    collective: str
    size: int
    seconds: float


def bench_comm(ranks: int | None = None, sizes: Sequence[int] = DEFAULT_SIZES) -> MeasurementReport:
    """Bus bandwidth of every collective, between GPUs with NCCL or between processes of this machine with gloo.

    On GPUs once with peer-to-peer copies and once without: where both are equal, the GPUs exchange through the host.
    """
    gpus = torch.cuda.device_count()
    ranks = ranks or max(2, gpus)
    if gpus and ranks > gpus:
        raise UsageError(f"{ranks} ranks need as many GPUs, and there are {gpus}: set --gpus {gpus}")
    if ranks < 2:
        raise UsageError("communication needs at least two ranks: set --gpus 2")
    backend: Backend = "nccl" if gpus else "gloo"
    rows = []
    for note, disabled in (("", None), ("P2P off", "1")) if gpus else (("", None),):
        with _environment(P2P_VARIABLE, disabled):
            results: list[list[CollectiveTime]] = run_ranks(ranks, measure_collectives, sizes, backend, backend=backend)
        for times in zip(*results, strict=True):  # a collective ends with its slowest rank
            rows.append(_measurement(max(times, key=lambda found: found.seconds), ranks, note))
    title = f"bus bandwidth between {ranks} ranks of this machine ({backend}), median of the repeats"
    return MeasurementReport("comm", title, this_machine(), rows)


def _measurement(slowest: CollectiveTime, ranks: int, note: str) -> Measurement:
    share = next(kind.link_share(ranks) for kind in COLLECTIVES if kind.name == slowest.collective)
    name = f"{slowest.collective} {show_bytes(slowest.size)}" + (f", {note}" if note else "")
    bandwidth = share * slowest.size / slowest.seconds / 1e9
    return Measurement(name, bandwidth, "GB/s", f"{1e3 * slowest.seconds:.3g} ms")


def measure_collectives(sizes: Sequence[int], backend: str) -> list[CollectiveTime]:
    """In every rank of a process group."""
    device = torch.device("cuda", dist.get_rank()) if backend == "nccl" else torch.device("cpu")
    ranks = dist.get_world_size()
    found = []
    for kind in COLLECTIVES:
        for size in sizes:
            elements = max(1, size // 4 // ranks) * ranks  # every rank has an equal part
            data, buffer = (torch.zeros(elements, device=device) for _ in range(2))
            run = partial(kind.run, data, buffer, torch.zeros(elements // ranks, device=device))
            found.append(CollectiveTime(kind.name, 4 * elements, _time(run, device)))
    return found


def _time(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds. The ranks agree on the number of repeats, or one would wait for ever."""
    _timed(run, device)  # connects
    first = torch.tensor([_timed(run, device)], device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MAX)
    repeats = min(MAX_REPEATS, max(3, round(MIN_SECONDS / max(first.item(), 1e-6))))
    return statistics.median(_timed(run, device) for _ in range(repeats))


def _timed(run: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    return wall_seconds(run, device)


def _pass_on(data: Tensor, received: Tensor) -> None:
    """To the next rank of a ring, from the one before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    exchange = [dist.P2POp(dist.isend, data, (rank + 1) % ranks), dist.P2POp(dist.irecv, received, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """For processes that are started here: NCCL reads its settings once."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
