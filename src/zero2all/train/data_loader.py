"""Prefetched batches, one per step: each data-parallel rank reads only its own rows. Copies between host and device
that none of them waits for: batches to the device, metrics from it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from zero2all.base.machine.devices import copy_to_device, on_current_device
from zero2all.cluster.launch.heartbeat import DEVICE_WATCH
from zero2all.model import IGNORE_INDEX, document_starts
from zero2all.model.ops.varlen import document_cu_seqlens
from zero2all.parallel.mesh import shard_range, split_batch
from zero2all.tokens.conversation_rows import CompletionCounts, RowCompletions
from zero2all.train.plan import Plan, StagePlan

PREFETCH_BATCHES = 2  # one thread and two batches: worker processes were slower
PADDING_SOURCE = ""  # the source of rows that pad the last micro-batch


@dataclass(frozen=True)
class DeviceBatch:
    """What the model gets of a batch."""

    inputs: Tensor
    targets: Tensor
    doc_starts: Tensor | None
    """``document_starts``, if attention stays inside documents."""
    cu_seqlens_MN: Tensor | None
    """``document_cu_seqlens`` of its micro-batches, where a kernel needs them."""
    copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """To be called before use. The device waits for the copy, the host does not."""
        if self.copied is None:
            return
        stream = torch.cuda.current_stream(self.inputs.device)
        stream.wait_event(self.copied)
        for tensor in (self.inputs, self.targets, self.doc_starts, self.cu_seqlens_MN):
            if tensor is not None:
                tensor.record_stream(stream)  # its memory is not reused before this stream has read it


class BatchCopier:
    """Copies a batch to a device, on a CUDA stream of its own.

    >>> copier = BatchCopier(device, model.runner.micro_batch_rows)
    >>> copier.copy(inputs, targets, doc_starts=None, micro_batch_size=4)  # in the thread of the loader
    """

    def __init__(self, device: torch.device, micro_batch_rows: Callable[[int, int | None], int]) -> None:
        self._device, self._micro_batch_rows = device, micro_batch_rows
        self._stream: torch.cuda.Stream | None = None

    def copy(
        self, inputs: Tensor, targets: Tensor, doc_starts: Tensor | None, micro_batch_size: int | None
    ) -> DeviceBatch:
        """On a CPU nothing is copied."""
        device, cu_seqlens_MN = self._device, None
        if device.type != "cuda":
            starts = None if doc_starts is None else doc_starts.to(device)
            return DeviceBatch(inputs.to(device), targets.to(device), starts, None)
        if doc_starts is not None:
            cu_seqlens_MN = document_cu_seqlens(doc_starts, self._micro_batch_rows(len(inputs), micro_batch_size))
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            inputs, targets = (copy_to_device(tensor, device) for tensor in (inputs, targets))
            doc_starts, cu_seqlens_MN = (
                None if tensor is None else copy_to_device(tensor, device) for tensor in (doc_starts, cu_seqlens_MN)
            )
            return DeviceBatch(inputs, targets, doc_starts, cu_seqlens_MN, self._stream.record_event())


class HostCopy:
    """A matrix and a vector of the device on their way to the host, as one copy. Only ``tolist`` waits for it."""

    def __init__(self, matrix: Tensor, vector: Tensor) -> None:
        self._columns, self._cells = matrix.shape[1], matrix.numel()
        tensor = torch.cat([matrix.flatten(), vector.to(matrix)])
        self._tensor, self._copied = tensor, None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.current_stream(tensor.device).record_event()

    def tolist(self) -> tuple[list[list[float]], list[float]]:
        if self._copied is not None:
            with DEVICE_WATCH.host_waits():
                self._copied.synchronize()
        values: list[float] = self._tensor.tolist()
        rows = [values[first : first + self._columns] for first in range(0, self._cells, self._columns)]
        return rows, values[self._cells :]


@dataclass(frozen=True)
class BatchCompletions:
    """The completions in a batch."""

    rows: list[RowCompletions]
    """The completions in this rank's rows, without padding."""
    counts: CompletionCounts
    """Over all ranks."""


@dataclass(frozen=True)
class Batch:
    """One rank's share of a step. Padding rows have no valid target, so they do not count."""

    step: int
    stage: StagePlan
    inputs: Tensor  # int64 [rows, seq_len], rows a multiple of the micro-batch
    targets: Tensor  # the same shape
    doc_starts: Tensor | None  # where the document of each position starts, of the same shape; None: no mask
    sources: list[str]  # of each row
    micro_batch_size: int | None  # rows of one forward pass, if the recipe sets it
    sample_range: tuple[int, int]  # of the global batch, or of the part of it that this island trains
    global_valid_tokens: int  # over all ranks
    completions: BatchCompletions | None = None  # for objectives that compare them
    on_device: DeviceBatch | None = None  # the same tensors where the model is, if the loader copies them
    data_wait: float = 0.0  # seconds that training waited for it

    @property
    def device_targets(self) -> Tensor:
        return self.targets if self.on_device is None else self.on_device.targets


def read_batch(
    plan: Plan, step: int, dp_rank: int = 0, dp_world_size: int = 1, island: int = 0, islands: int = 1
) -> Batch:
    """One data-parallel rank's rows of the global batch, or of the part of it that an island trains.

    Every rank must run the same number of micro-batches, so shorter shares are padded.
    """
    stage = plan.stage_of(step)
    start, stop = stage.sample_range(step)
    start, stop = (start + row for row in shard_range(stop - start, island, islands))
    count = stop - start
    first, last = (start + row for row in shard_range(count, dp_rank, dp_world_size))
    split = split_batch(count, dp_world_size, stage.micro_batch_size)
    rows = split.micro_batches * split.samples
    samples = stage.dataset.read(first, last)
    # Padding repeats text of the batch: constant rows would all go to the same experts and distort their load.
    text = samples if last > first else stage.dataset.read(start, start + 1)
    chosen = np.arange(rows) % len(text.tokens)
    token_tensor = torch.from_numpy(text.tokens[chosen])
    inputs, targets = token_tensor[:, :-1].contiguous(), token_tensor[:, 1:].clone()
    doc_starts = None if text.is_first is None else document_starts(torch.from_numpy(text.is_first[chosen, :-1]))
    targets[: last - first][~torch.from_numpy(samples.mask[:, 1:])] = IGNORE_INDEX
    targets[last - first :] = IGNORE_INDEX
    completions = None
    if plan.compares_completions:
        completions = BatchCompletions(
            stage.dataset.read_completions(first, last), stage.dataset.count_completions(start, stop)
        )
    padding = [PADDING_SOURCE] * (rows - len(samples.sources))
    return Batch(
        step=step,
        stage=stage,
        inputs=inputs,
        targets=targets,
        doc_starts=doc_starts,
        sources=samples.sources + padding,
        micro_batch_size=stage.micro_batch_size and split.samples,
        sample_range=(start, stop),
        global_valid_tokens=stage.dataset.count_targets(start, stop),
        completions=completions,
    )


class DataLoader:
    """Batches from ``first_step`` on, prefetched by one thread while the previous step is computed.

    >>> with DataLoader(plan, first_step=0, dp_rank=0, dp_world_size=1) as loader:
    ...     for batch in loader: ...
    """

    def __init__(
        self,
        plan: Plan,
        first_step: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        copier: BatchCopier | None = None,
        skipped_steps: Collection[int] = (),
        island: tuple[int, int] = (0, 1),
    ) -> None:
        """No batch is read for ``skipped_steps``. With ``copier`` batches come with their tensors on the device.
        ``island``: its number, and how many there are."""
        self._plan, self._first_step, self._copier = plan, first_step, copier
        self._dp_rank, self._dp_world_size = dp_rank, dp_world_size
        self._skipped_steps, self._island = skipped_steps, island
        self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(PREFETCH_BATCHES)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=on_current_device(self._prefetch), daemon=True)

    def __enter__(self) -> DataLoader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        while self._thread.is_alive():  # it may be blocked on a full queue
            self._drain()
            self._thread.join(0.01)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            begin = time.perf_counter()
            batch = self._queue.get()
            seconds = time.perf_counter() - begin
            if batch is None:
                return
            if isinstance(batch, BaseException):
                raise batch
            yield replace(batch, data_wait=seconds)

    def seek(self, first_step: int, skipped_steps: Collection[int] = ()) -> None:
        """Continue from another step, without ``skipped_steps``."""
        self.__exit__()
        self._drain()
        self._first_step, self._skipped_steps = first_step, skipped_steps
        self._closed.clear()
        self._thread = threading.Thread(target=on_current_device(self._prefetch), daemon=True)
        self._thread.start()

    def _prefetch(self) -> None:
        try:
            for step in range(self._first_step, self._plan.total_steps):
                if step in self._skipped_steps:
                    continue
                batch = read_batch(self._plan, step, self._dp_rank, self._dp_world_size, *self._island)
                if self._copier is not None:
                    tensors = (batch.inputs, batch.targets, batch.doc_starts)
                    batch = replace(batch, on_device=self._copier.copy(*tensors, batch.micro_batch_size))
                self._queue.put(batch)
                if self._closed.is_set():
                    return
            self._queue.put(None)
        except BaseException as error:  # raised again in the consumer
            self._queue.put(error)

    def _drain(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()
