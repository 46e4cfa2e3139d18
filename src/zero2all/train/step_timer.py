"""Where the time of a step goes: ``time/*`` in the record.

A step begins when the metrics of the step before are copied to the host, and ends when its own are. So all its CUDA
events are complete when its metrics are read, and the optimizer in it is the update of the step before.
Validation and checkpoints are not part of a step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import nn

from zero2all.base.torch_private import fsdp_wait_methods
from zero2all.cluster.launch.heartbeat import DEVICE_WATCH, DeviceWatch
from zero2all.model.blocks import LMHead
from zero2all.parallel import ParallelModel

Part = Literal["data", "forward", "loss", "backward", "communication", "optimizer", "logging", "other"]
PARTS: tuple[Part, ...] = get_args(Part)
T = TypeVar("T")


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on one rank; the parts add up to the step."""

    seconds: float
    parts: Mapping[Part, float]

    def metrics(self, rank: int) -> dict[str, float]:
        """For the record. Ranks other than 0 record only what is needed to find the slow one."""
        parts = self.parts if rank == 0 else {"communication": self.parts["communication"]}
        return {
            "step_time": round(self.seconds, 6),
            **{f"time/{part}": round(seconds, 6) for part, seconds in parts.items()},
        }


class Clock(Protocol):
    """Moments, and the seconds between two of them."""

    def now(self) -> Any: ...

    def seconds(self, begin: Any, end: Any) -> float: ...


class HostClock:
    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class DeviceClock:
    """Events on the stream that computes: what the host does while the device is busy takes no time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) / 1000  # of complete events, so the host does not wait


@dataclass(frozen=True)
class StepMarks:
    """The moments of a step at which another part began."""

    clock: Clock
    marks: list[tuple[Part | None, Any]]
    """A part, and when it began; None: not in the step. The last one only ends the step."""

    def read(self) -> StepTime:
        """On a GPU, after the metrics of the step have been read: before, the events are not complete."""
        parts = dict.fromkeys(PARTS, 0.0)
        for (part, begin), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            if part is not None:
                parts[part] += self.clock.seconds(begin, end)
        return StepTime(sum(parts.values()), parts)


class StepTimer:
    """Divides a rank's time into parts: clocks on a CPU, CUDA events on a GPU, without a host sync.

    >>> timer = StepTimer(HostClock())
    >>> timer.restart()
    >>> with timer.part("optimizer"):
    ...     optimizer.step()
    >>> timer.finish_step().read().parts["optimizer"]
    """

    def __init__(self, clock: Clock, watch: DeviceWatch | None = None) -> None:
        """``watch`` gets the events of a GPU, for reports of hangs."""
        self.clock, self._watch = clock, watch
        self.enabled = True
        self._thread = threading.get_ident()
        self._parts: list[Part | None] = ["other"]  # which part is inside which
        self._marks: list[tuple[Part | None, Any]] = []

    @classmethod
    def for_device(cls, device: torch.device) -> StepTimer:
        return cls(DeviceClock(device), DEVICE_WATCH) if device.type == "cuda" else cls(HostClock())

    @property
    def current(self) -> Part | None:
        """The part that time counts for now; None: for none."""
        return self._parts[-1]

    def restart(self) -> None:
        """Begin a step here and forget what was not finished."""
        self._thread = threading.get_ident()
        self._marks = [(self.current, self.clock.now())]

    def finish_step(self) -> StepMarks:
        """End the step here and begin the next one."""
        finished, now = self._marks, self.clock.now()
        self._marks = [(self.current, now)]
        return StepMarks(self.clock, [*finished, (None, now)])

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """Time counts for ``part``, not for what it is inside of."""
        depth = len(self._parts)
        self.begin(part)
        try:
            yield
        finally:
            del self._parts[depth + 1 :]  # of a forward pass that failed, whose end no hook has seen
            self.end()

    def begin(self, part: Part | None) -> None:
        self._parts.append(part if self._parts[-1] is not None else None)
        self._mark()

    def end(self) -> None:
        self._parts.pop()
        self._mark()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For validation and checkpoints, which have metrics of their own."""
        self.begin(None)
        try:
            yield
        finally:
            self.end()

    def waits(self, batches: Iterable[T]) -> Iterator[T]:
        """``batches``; the wait for each is the part ``data``."""
        iterator = iter(batches)
        while True:
            with self.part("data"):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch

    def _mark(self) -> None:
        if self.enabled:
            now = self.clock.now()
            self._marks.append((self.current, now))
            if self._watch is not None and self.current is not None:
                self._watch.add(self.current, now)

    @contextmanager
    def watching(self, model: ParallelModel) -> Iterator[None]:
        """Find forward pass, loss and exposed communication of a model; the trainer marks the other parts."""
        with ExitStack() as stack:
            for root in model.model_parts:
                self._watch_forward(stack, root, "forward")
                if isinstance(root.lm_head, LMHead):
                    self._watch_forward(stack, root.lm_head, "loss")
                for owner, name in fsdp_wait_methods(root):
                    stack.enter_context(self._timed_method(owner, name, any_thread=True))
            if model.ddp_group is not None:
                self._watch_ddp(stack, model.model)
            stack.enter_context(self._timed_method(dist.Work, "wait", any_thread=False))
            yield

    def _watch_forward(self, stack: ExitStack, module: nn.Module, part: Part) -> None:
        # The outermost hooks: weights are gathered inside of them.
        begin = module.register_forward_pre_hook(lambda *_: self.begin(part), prepend=True)
        end = module.register_forward_hook(lambda *_: self.end(), always_call=True)
        stack.callback(begin.remove)
        stack.callback(end.remove)

    def _watch_ddp(self, stack: ExitStack, model: nn.Module) -> None:
        """DDP waits inside autograd: what comes after the last gradient, which the first weight has."""
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)

        def last_gradient(_: object) -> None:
            if self.current == "backward":  # until the part ends, with the backward pass
                self._parts[-1] = "communication"
                self._mark()

        def next_forward(*_: object) -> None:
            if len(self._parts) > 1 and self._parts[-1] == "communication":
                self._parts[-1] = "backward"

        handle = first.register_post_accumulate_grad_hook(last_gradient)  # type: ignore[no-untyped-call]
        stack.callback(handle.remove)
        stack.callback(model.register_forward_pre_hook(next_forward, prepend=True).remove)

    @contextmanager
    def _timed_method(self, owner: Any, name: str, *, any_thread: bool) -> Iterator[None]:
        """The host is blocked in this method, or the stream waits: the part ``communication``."""
        original = getattr(owner, name)
        own = name in vars(owner)

        def timed(*args: Any, **kwargs: Any) -> Any:
            # Threads that save a checkpoint wait for other ranks too.
            if not any_thread and threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            self.begin("communication")
            try:
                return original(*args, **kwargs)
            finally:
                self.end()

        setattr(owner, name, timed)
        try:
            yield
        finally:
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
