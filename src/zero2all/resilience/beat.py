"""How a rank says that it is alive: a few bytes of a memory-mapped file, which its agent reads as it likes.

A page that two processes map outlives either of them and costs the writer nothing, so every step can beat.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

AGENT_DIR = "Z2A_AGENT_DIR"  # the environment variable that tells a rank where its agent looks
STORE = "Z2A_STORE"  # and this one, where the agents' store is
_LAYOUT = struct.Struct("<qd5d")


class Mark(IntEnum):
    """Stations of a start, each with its time in the beat."""

    IMPORTED = 0
    JOINED = 1  # the process group is there
    LOADED = 2  # model, optimizer and checkpoint are there
    STEPPED = 3  # the first step is done
    ENDING = 4  # no more steps: what is left to do takes its own time


@dataclass(frozen=True)
class Pulse:
    """What an agent reads: steps done (-1 before any is known of), when the rank last spoke, when it passed what."""

    step: int
    time: float
    marks: tuple[float, ...]

    @property
    def has_stepped(self) -> bool:
        return self.marks[Mark.STEPPED] > 0

    @property
    def stepping(self) -> bool:
        """Whether the next sign of life should come soon."""
        return self.has_stepped and not self.marks[Mark.ENDING]


class Beat:
    """
    >>> beat = Beat.of_this_rank()
    >>> beat.mark(Mark.LOADED)
    >>> beat(done=12)  # after every step

    Times are of ``time.monotonic``, which on Linux all processes of a machine share. Without an agent nobody reads it.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        if path is None:
            self._page = mmap.mmap(-1, _LAYOUT.size)
        else:
            with open(path, "r+b") as stream:
                self._page = mmap.mmap(stream.fileno(), _LAYOUT.size)

    @classmethod
    def of_this_rank(cls) -> Beat:
        return cls(beat_path(Path(os.environ[AGENT_DIR]), int(os.environ["LOCAL_RANK"])) if has_agent() else None)

    def __call__(self, done: int) -> None:
        pulse, now = self.read(), time.monotonic()
        if not pulse.has_stepped:
            self.mark(Mark.STEPPED)
            pulse = self.read()
        _LAYOUT.pack_into(self._page, 0, done, now, *pulse.marks)

    def mark(self, mark: Mark, done: int | None = None) -> None:
        """``done`` is how many steps a loaded state has behind it: what fails now fails after them, as before."""
        pulse, now = self.read(), time.monotonic()
        marks = tuple(now if number == mark else before for number, before in enumerate(pulse.marks))
        _LAYOUT.pack_into(self._page, 0, pulse.step if done is None else done, now, *marks)

    def alive(self) -> None:
        """No step, and yet no hang: for what may take long and says so."""
        pulse = self.read()
        _LAYOUT.pack_into(self._page, 0, pulse.step, time.monotonic(), *pulse.marks)

    def read(self) -> Pulse:
        step, when, *marks = _LAYOUT.unpack_from(self._page)
        return Pulse(step, when, tuple(marks))

    def tell(self, run: Path) -> None:
        """Where the run is: the agent leaves its reports there."""
        if self.path is not None:
            run_note(self.path.parent).write_text(str(run.absolute()), encoding="utf-8")


def has_agent() -> bool:
    return AGENT_DIR in os.environ


def new_beat(directory: Path, local_rank: int) -> Beat:
    """On the agent's side, before the rank is started."""
    path = beat_path(directory, local_rank)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(_LAYOUT.pack(-1, time.monotonic(), *[0.0] * len(Mark)))
    fresh.replace(path)  # a rank of before keeps its own page
    return Beat(path)


def beat_path(directory: Path, local_rank: int) -> Path:
    return directory / f"beat-{local_rank}"


def run_note(directory: Path) -> Path:
    return directory / "run"
