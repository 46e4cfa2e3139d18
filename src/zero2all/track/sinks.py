"""Other trackers on the same call. A sink is one small class; each runs on a thread of its own and may fail at will.

``track.sinks`` in a recipe names them: ``tensorboard``, ``wandb``, or ``package.module:Class`` for one of your own,
which is called with the run directory.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from zero2all.errors import UsageError, Z2aError, need
from zero2all.track.index import NOT_VALUES


class Sink(Protocol):
    """What a tracker has to offer. It may raise and it may be slow."""

    def step(self, step: int, values: dict[str, float]) -> None: ...

    def event(self, name: str, details: dict[str, Any]) -> None: ...

    def sample(self, step: int, name: str, text: str) -> None: ...

    def histogram(self, step: int, name: str, counts: list[float], edges: list[float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files that ``tensorboard --logdir`` reads."""

    def __init__(self, directory: Path) -> None:
        need("tensorboard", "track")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory / "tensorboard"))

    def step(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def event(self, name: str, details: dict[str, Any]) -> None:
        self._writer.add_text(f"events/{name}", str(details), details.get("step", 0))
        self._writer.flush()

    def sample(self, step: int, name: str, text: str) -> None:
        indented = "\n".join("    " + line for line in text.splitlines())  # as code: TensorBoard reads Markdown
        self._writer.add_text(f"samples/{name}", indented, step)

    def histogram(self, step: int, name: str, counts: list[float], edges: list[float]) -> None:
        middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
        number = sum(counts)
        self._writer.add_histogram_raw(
            name, edges[0], edges[-1], number,
            sum(count * middle for count, middle in zip(counts, middles, strict=True)),
            sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)),
            edges[1:], counts, step,
        )  # fmt: skip

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases. Offline unless WANDB_MODE says otherwise; ``wandb sync`` sends what was kept."""

    def __init__(self, directory: Path) -> None:
        self._wandb: Any = need("wandb", "wandb")
        self._directory = directory

    @cached_property
    def _run(self) -> Any:
        """Begun at the first line, on the sink's thread: it may wait for a server."""
        name, mode = self._directory.parent.name, os.environ.get("WANDB_MODE", "offline")
        return self._wandb.init(project="zero2all", name=name, dir=str(self._directory), mode=mode)

    def step(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def event(self, name: str, details: dict[str, Any]) -> None:
        self._run.log({f"events/{name}": str(details)}, commit=False)  # with the next step: it takes none of its own

    def sample(self, step: int, name: str, text: str) -> None:
        self._run.log({f"samples/{name}": text}, step=step)

    def histogram(self, step: int, name: str, counts: list[float], edges: list[float]) -> None:
        self._run.log({name: self._wandb.Histogram(np_histogram=(counts, edges))}, step=step)

    def close(self) -> None:
        self._run.finish()


BUILT_IN: dict[str, Callable[[Path], Sink]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def open_sinks(names: Iterable[str], directory: Path) -> list[Sink]:
    """The sinks that a recipe asks for. One that is not installed is an error before training, never during it."""
    return [_maker(name)(directory) for name in names]


def _maker(name: str) -> Callable[[Path], Sink]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UsageError(f"track.sinks: no sink {name!r}; there are {', '.join(BUILT_IN)}, or package.module:Class")
    try:
        maker: Callable[[Path], Sink] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise Z2aError(f"track.sinks: {name} cannot be loaded ({error})") from error
    return maker


def hand_over(sink: Sink) -> Callable[[list[dict[str, Any]]], None]:
    """Lines of a record as calls of a sink."""

    def deliver(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if "event" in line:
                sink.event(line["event"], {name: value for name, value in line.items() if name != "event"})
            elif "sample" in line:
                sink.sample(line["step"], line["sample"], line["text"])
            elif "histogram" in line:
                sink.histogram(line["step"], line["histogram"], line["counts"], line["edges"])
            else:
                sink.step(line["step"], {name: value for name, value in line.items() if name not in NOT_VALUES})

    return deliver
