"""Faults that a rank injects into itself, at a step or injection point chosen in advance: no race decides."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from zero2all.parallel import ParallelModel
from zero2all.train import TrainerHooks
from zero2all.train.data_loader import Batch

LOCK_PATIENCE_VARIABLE = "Z2A_CHAOS_LOCK_PATIENCE"  # seconds a rank waits for the lock of its run; minutes if not set
HOLD_SECONDS = 3600.0  # longest wait of a held rank; it ends with its agent
InjectionPoint = Literal[
    "step", "start", "restore", "staging", "marker", "persist", "manifest", "gradient", "batch", "weights"
]  # fmt: skip


@dataclass(frozen=True)
class Injection:
    """``times`` counts over all restarts. ``step`` is the step of the fault, or the first it may occur in."""

    act: str
    rank: int = 0
    step: int = 0
    where: InjectionPoint = "step"
    times: int = 1
    after: int | None = None
    """The number of an injection that must have been triggered before."""
    seconds: float = 0.0
    """How long it takes, for those that take a time chosen in advance."""


class FaultInjector:
    """The injections of one rank. Each records its trigger time in a file before it acts."""

    def __init__(self, injections: list[Injection], rank: int, directory: Path) -> None:
        self.active = [(number, injection) for number, injection in enumerate(injections) if injection.rank == rank]
        self.directory = directory
        self.step = -1

    def before_step(self, batch: Batch) -> None:
        self.step = batch.step
        self.trigger("step")
        if self._due("batch"):
            copied = []
            if batch.on_device is not None:
                batch.on_device.wait()
                copied = [batch.on_device.inputs, batch.on_device.targets]
            for tokens in (batch.inputs, batch.targets, *copied):
                tokens.fill_(3)  # unlike any text

    def trigger(self, where: InjectionPoint) -> None:
        for number, injection in self._due(where):
            getattr(self, injection.act)(number)

    def _due(self, where: InjectionPoint) -> list[tuple[int, Injection]]:
        due = [
            (number, injection)
            for number, injection in self.active
            if injection.where == where
            and (injection.after is None or (self.directory / f"triggered-{injection.after}-0.json").exists())
            and (self.step == injection.step if where in ("step", "batch") else self.step >= injection.step)
        ]
        return [(number, injection) for number, injection in due if self._claim(number, injection.times)]

    def _claim(self, number: int, times: int) -> bool:
        for occurrence in range(times):
            path = self.directory / f"triggered-{number}-{occurrence}.json"
            complete = path.with_suffix(f".{os.getpid()}")  # linked when complete: nobody reads half a file
            complete.write_text(json.dumps({"time": time.time(), "step": self.step, "pid": os.getpid()}))
            try:
                os.link(complete, path)
                return True
            except FileExistsError:
                continue
            finally:
                complete.unlink()
        return False

    def hooks(self) -> TrainerHooks:
        """The hooks with which a trainer reaches the injection points."""
        return TrainerHooks(
            on_start=lambda: self.trigger("start"),
            on_batch=self.before_step,
            on_gradients=self.corrupt,
            on_checkpoint=self.trigger,
        )

    def corrupt(self, model: ParallelModel) -> None:
        for _ in self._due("gradient"):
            gradient = next(p.grad for p in model.model.parameters() if p.grad is not None)
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).view(-1)[0] = float("nan")
        for _ in self._due("weights"):
            weights = next(iter(model.model.parameters())).data
            bits = (weights.to_local() if hasattr(weights, "to_local") else weights).view(torch.int32).view(-1)
            bits[0] ^= 1 << 12  # a small change of one weight, which the loss does not show at once

    # Fault actions, called by the name in ``Injection.act``

    def kill(self, number: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self, number: int) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def terminate(self, number: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def segfault(self, number: int) -> None:
        ctypes.string_at(0)

    def abort(self, number: int) -> None:
        os.abort()

    def bus_error(self, number: int) -> None:
        os.kill(os.getpid(), signal.SIGBUS)

    def leave(self, number: int) -> None:
        os._exit(7)

    def fail(self, number: int) -> None:
        raise ValueError("an injected fault")

    def want_memory(self, number: int) -> None:
        torch.empty(1 << 50, dtype=torch.uint8)

    def eat_memory(self, number: int) -> None:
        eaten = []
        while True:  # until the OOM killer acts
            eaten.append(b"x" * (32 << 20))

    def pause(self, number: int) -> None:
        """What this thread does takes longer, as on slow storage."""
        time.sleep(dict(self.active)[number].seconds)

    def loop(self, number: int) -> None:
        while True:
            time.sleep(0.01)

    def hold_the_lock(self, number: int) -> None:
        """Hang in native code with the GIL held: no Python thread of this process can run."""
        ctypes.PyDLL(None).sleep(1000)

    def hold(self, number: int) -> None:
        """Wait until the scenario releases this rank."""
        deadline = time.monotonic() + HOLD_SECONDS
        while not (self.directory / f"go-{number}").exists() and time.monotonic() < deadline:
            time.sleep(0.02)


def write_injections(path: Path, injections: list[Injection]) -> None:
    path.write_text(json.dumps([asdict(injection) for injection in injections]), encoding="utf-8")


def read_injections(path: Path) -> list[Injection]:
    return [Injection(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]
