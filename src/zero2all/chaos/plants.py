"""What a rank of the suite does to itself, at a step or a place that was agreed before: no race decides."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from zero2all.train.batches import Batch

HOLD = 3600.0  # seconds that a held rank waits at most; it ends with its agent
Where = Literal["step", "start", "staging", "marker", "persist", "manifest", "gradient", "batch", "weights"]


@dataclass(frozen=True)
class Plant:
    """``times`` counts over all starts of the job. ``step`` is the step at which it happens, or after which."""

    act: str
    rank: int = 0
    step: int = 0
    where: Where = "step"
    times: int = 1


class Planted:
    """The plants of one rank. Each leaves a note when it strikes, with the time, before it does."""

    def __init__(self, plants: list[Plant], rank: int, directory: Path) -> None:
        self.mine = [(number, plant) for number, plant in enumerate(plants) if plant.rank == rank]
        self.directory = directory
        self.step = -1

    def at_step(self, batch: Batch) -> None:
        self.step = batch.step
        self.strike("step")
        if self._due("batch"):
            for tokens in (batch.inputs, batch.targets):
                tokens.fill_(3)  # no text looks like this

    def strike(self, where: Where) -> None:
        for number, plant in self._due(where):
            getattr(self, plant.act)(number)

    def _due(self, where: Where) -> list[tuple[int, Plant]]:
        due = [
            (number, plant)
            for number, plant in self.mine
            if plant.where == where
            and (self.step == plant.step if where in ("step", "batch") else self.step >= plant.step)
        ]
        return [(number, plant) for number, plant in due if self._note(number, plant.times)]

    def _note(self, number: int, times: int) -> bool:
        for time_number in range(times):
            path = self.directory / f"struck-{number}-{time_number}.json"
            whole = path.with_suffix(f".{os.getpid()}")  # who sees the note must not see half of it
            whole.write_text(json.dumps({"time": time.time(), "step": self.step, "pid": os.getpid()}))
            try:
                os.link(whole, path)
                return True
            except FileExistsError:
                continue
            finally:
                whole.unlink()
        return False

    def install(self) -> None:
        """Lay the plants that are not at a step into the functions where they strike."""
        from torch.distributed.checkpoint import state_dict_saver

        from zero2all.parallel.spread import Spread
        from zero2all.resilience import checkpoint, flash
        from zero2all.train import job

        self._before(job, "Team", "start")  # the first thing that ranks do together
        self._before(flash.Slot, "finish", "marker")
        self._after(flash.Slot, "begin", "staging")
        self._before(state_dict_saver, "save", "persist")
        self._before(checkpoint, "write_manifest", "manifest")
        clip = Spread.clip

        @functools.wraps(clip)
        def spoiled(spread: Spread, longest: float) -> torch.Tensor:
            for _ in self._due("gradient"):
                gradient = next(p.grad for p in spread.model.parameters() if p.grad is not None)
                (gradient.to_local() if hasattr(gradient, "to_local") else gradient).view(-1)[0] = float("nan")
            for _ in self._due("weights"):
                weights = next(iter(spread.model.parameters())).data
                bits = (weights.to_local() if hasattr(weights, "to_local") else weights).view(torch.int32).view(-1)
                bits[0] ^= 1 << 12  # a small part of one weight: nothing that a loss would show at once
            return clip(spread, longest)

        setattr(Spread, "clip", spoiled)  # noqa: B010

    def _before(self, holder: Any, name: str, where: Where) -> None:
        function = getattr(holder, name)

        @functools.wraps(function)
        def struck(*args: Any, **kwargs: Any) -> Any:
            self.strike(where)
            return function(*args, **kwargs)

        setattr(holder, name, struck)

    def _after(self, holder: Any, name: str, where: Where) -> None:
        function = getattr(holder, name)

        @functools.wraps(function)
        def struck(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.strike(where)
            return result

        setattr(holder, name, struck)

    # Acts

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
        raise ValueError("a fault made on purpose")

    def want_memory(self, number: int) -> None:
        torch.empty(1 << 50, dtype=torch.uint8)

    def eat_memory(self, number: int) -> None:
        eaten = []
        while True:  # until the kernel steps in
            eaten.append(b"x" * (32 << 20))

    def loop(self, number: int) -> None:
        while True:
            time.sleep(0.01)

    def hold_the_lock(self, number: int) -> None:
        """Hang in native code with Python's lock held: no thread of this process runs any more."""
        ctypes.PyDLL(None).sleep(1000)

    def hold(self, number: int) -> None:
        """Wait for what is done from outside."""
        deadline = time.monotonic() + HOLD
        while not (self.directory / f"go-{number}").exists() and time.monotonic() < deadline:
            time.sleep(0.02)

    def slow(self, number: int) -> None:
        time.sleep(0.3)


def write_plants(path: Path, plants: list[Plant]) -> None:
    path.write_text(json.dumps([asdict(plant) for plant in plants]), encoding="utf-8")


def read_plants(path: Path) -> list[Plant]:
    return [Plant(**plant) for plant in json.loads(path.read_text(encoding="utf-8"))]
