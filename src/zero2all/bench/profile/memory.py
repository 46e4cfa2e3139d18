"""Memory of one step over time, and what it consists of at its peak."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from zero2all.base.torch_private import dump_cuda_memory, gathered_weights, record_cuda_memory
from zero2all.parallel import ParallelModel
from zero2all.parallel.storage_tracker import Allocation, StorageTracker
from zero2all.train.step_timer import Part, StepTimer

SNAPSHOT_GROWTH = 1.01  # the peak is known to 1%
MAX_POINTS = 2000  # of a timeline


@dataclass(frozen=True)
class MemoryPeak:
    """Bytes of tensors at the peak of a step, of one rank."""

    total: int
    parameters: int
    """This rank's shards."""
    gathered: int
    """Weights that FSDP has gathered."""
    gradients: int
    optimizer: int
    activations: int
    """All else that was allocated in a forward pass or loss."""
    other: int
    """Temporary tensors of the backward pass, communication buffers, batches, buffers of the model."""
    part: Part
    """The part of the step in which the peak was."""


@dataclass(frozen=True)
class MemoryTimeline:
    peak: MemoryPeak
    points: list[tuple[float, int]]
    """Seconds since the step began, and bytes of tensors."""


class MemoryTracker(StorageTracker):  # type: ignore[no-untyped-call]
    """Follows the storages of tensors on one device while it is active. Blocks must not be compiled.

    >>> with MemoryTracker(model, optimizers, timer) as tracker:
    ...     step()
    >>> tracker.timeline().peak.activations
    """

    def __init__(self, model: ParallelModel, optimizers: list[Optimizer], timer: StepTimer) -> None:
        super().__init__(model.mesh.device)
        self._model, self._optimizers, self._timer = model, optimizers, timer
        # Shards: in a step a module of FSDP has gathered ones in their place.
        self._own = list(model.model.parameters())
        self._total = 0
        self._begin = time.perf_counter()
        self._points: list[tuple[float, int]] = []
        self._peak: MemoryPeak | None = None

    def __enter__(self) -> MemoryTracker:
        for tensors in (self._own, self._gradients(), self._optimizer_state(), self._gathered()):
            for tensor in tensors:
                self.track(tensor, None)
        super().__enter__()
        return self

    def label(self) -> Part | None:
        return self._timer.current

    def changed(self, allocation: Allocation, growth: int) -> None:
        self._total += growth
        self._points.append((time.perf_counter() - self._begin, self._total))
        if self._peak is None or self._total > SNAPSHOT_GROWTH * self._peak.total:
            self._peak = self._attribute()

    def timeline(self) -> MemoryTimeline:
        assert self._peak is not None, "the tracker was active while nothing was allocated"
        return MemoryTimeline(self._peak, thin_out(self._points, MAX_POINTS))

    def _attribute(self) -> MemoryPeak:
        left = dict.fromkeys(self.live.values())

        def take(tensors: Iterable[Tensor]) -> int:
            taken = [allocation for allocation in self.allocations(tensors) if allocation in left]
            for allocation in taken:
                del left[allocation]
            return sum(allocation.size for allocation in taken)

        parameters, gradients = take(self._own), take(self._gradients())
        optimizer, gathered = take(self._optimizer_state()), take(self._gathered())
        activations = sum(each.size for each in left if each.label in ("forward", "loss"))
        known = parameters + gradients + optimizer + gathered + activations
        part = self._timer.current or "other"
        return MemoryPeak(
            self._total, parameters, gathered, gradients, optimizer, activations, self._total - known, part
        )

    def _gradients(self) -> Iterator[Tensor]:
        for parameter in (*self._own, *self._model.model.parameters()):
            if parameter.grad is not None:
                yield parameter.grad

    def _optimizer_state(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def _gathered(self) -> Iterator[Tensor]:
        yield from gathered_weights(self._model.model)


def thin_out(points: list[tuple[float, int]], count: int) -> list[tuple[float, int]]:
    """At most ``count`` points; of each stretch that becomes one, the highest."""
    if len(points) <= count:
        return points
    stretch = -(-len(points) // count)
    return [max(points[at : at + stretch], key=lambda point: point[1]) for at in range(0, len(points), stretch)]


@contextmanager
def cuda_memory_history(path: str) -> Iterator[None]:
    """Write the allocator's own history to a file for https://pytorch.org/memory_viz."""
    record_cuda_memory(enabled=True)
    try:
        yield
        dump_cuda_memory(path)
    finally:
        record_cuda_memory(enabled=False)
