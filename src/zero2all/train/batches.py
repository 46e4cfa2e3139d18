"""The batch of every step, read ahead of time: each rank reads only its own rows of it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from zero2all.model import IGNORE
from zero2all.parallel.layout import share
from zero2all.train.plan import Plan, StagePlan

AHEAD = 2  # one thread and two batches: worker processes only make it slower
PADDING = ""  # the source of rows that fill up the last micro-batch


@dataclass(frozen=True)
class Batch:
    """What one rank sees of a step. Rows of padding have no valid target, so they weigh nothing."""

    step: int
    stage: StagePlan
    inputs: Tensor  # int64 [rows, seq_len], rows a multiple of the micro-batch
    targets: Tensor  # the same shape
    sources: list[str]  # of each row
    micro_samples: int | None  # rows of one forward pass, if the recipe says so
    samples: tuple[int, int]  # of the whole batch, over all ranks
    targets_in_all: int  # over all ranks


def read_batch(plan: Plan, step: int, rank: int = 0, ranks: int = 1) -> Batch:
    """The rows of the batch that fall to one of the ranks that share it.

    Every rank must run as many micro-batches as the others, so short ones are filled up with padding.
    """
    stage = plan.at(step)
    start, stop = stage.batch(step)
    count = stop - start
    first, last = (start + row for row in share(count, rank, ranks))
    most = -(-count // ranks)
    micro = min(stage.micro_samples or most, most)
    rows = -(-most // micro) * micro
    tokens = np.zeros((rows, stage.stage.seq_len + 1), dtype=np.int64)
    tokens[: last - first], sources = stage.samples.read(first, last)
    # Padding looks like text: rows all alike would send it all to the same experts, whose load is watched.
    text = tokens[: last - first] if last > first else stage.samples.read(start, start + 1)[0]
    tokens[last - first :] = text[np.arange(rows - (last - first)) % len(text)]
    whole = torch.from_numpy(tokens)
    inputs, targets = whole[:, :-1], whole[:, 1:].clone()
    targets[last - first :] = IGNORE
    padding = [PADDING] * (rows - len(sources))
    return Batch(
        step=step,
        stage=stage,
        inputs=inputs,
        targets=targets,
        sources=sources + padding,
        micro_samples=stage.micro_samples and micro,
        samples=(start, stop),
        targets_in_all=count * stage.stage.seq_len,
    )


class Loader:
    """Batches from ``first`` on, read by one thread while the step before them is computed.

    >>> with Loader(plan, first=0, rank=0, ranks=1) as loader:
    ...     for batch in loader: ...
    """

    def __init__(
        self,
        plan: Plan,
        first: int,
        rank: int = 0,
        ranks: int = 1,
        pin: bool = False,
        skipped: Collection[int] = (),
    ) -> None:
        """``skipped`` are steps that are passed over."""
        self.waited = 0.0  # seconds that the last batch was not ready
        self._plan, self._first, self._rank, self._ranks, self._pin = plan, first, rank, ranks, pin
        self._skipped = skipped
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue(AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Loader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        while self._thread.is_alive():  # it may be waiting for room
            self._drain()
            self._thread.join(0.01)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            begin = time.perf_counter()
            batch = self._ready.get()
            self.waited = time.perf_counter() - begin
            if batch is None:
                return
            if isinstance(batch, BaseException):
                raise batch
            yield batch

    def go_to(self, first: int, skipped: Collection[int] = ()) -> None:
        """Go on from another step, passing over some."""
        self.__exit__()
        self._drain()
        self._first, self._skipped = first, skipped
        self._closed.clear()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for step in range(self._first, self._plan.total):
                if step in self._skipped:
                    continue
                batch = read_batch(self._plan, step, self._rank, self._ranks)
                if self._pin:
                    batch = replace(batch, inputs=batch.inputs.pin_memory(), targets=batch.targets.pin_memory())
                self._ready.put(batch)
                if self._closed.is_set():
                    return
            self._ready.put(None)
        except BaseException as error:  # raised again where the batch is asked for
            self._ready.put(error)

    def _drain(self) -> None:
        while not self._ready.empty():
            self._ready.get_nowait()
