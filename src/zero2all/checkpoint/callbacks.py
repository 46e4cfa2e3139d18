"""What the owner of a checkpoint manager is told while states are saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

CheckpointPhase = Literal["restore", "staging", "marker", "persist", "manifest"]
"""A state is about to be loaded. In memory: a slot is being overwritten; it is complete but for its marker. On durable
storage: the shards of this rank are about to be written; all are written but the manifest."""


def ignore(*details: object) -> None:
    """The callback of those who need none."""


@dataclass(frozen=True)
class SentReplica:
    """A state of this rank that all holders of its replicas have."""

    step: int
    bytes: int
    """Sent over the network, to all holders together."""
    seconds: float
    lag: int
    """Steps by which it was behind the newest state in memory when it had arrived."""


@dataclass(frozen=True)
class CheckpointCallbacks:
    """Called from the training thread or from background threads: they must be thread-safe."""

    on_wait: Callable[[], None] = ignore
    """Called every second while training waits for storage: a heartbeat, or it would look like a hang."""
    before_commit: Callable[[], bool] = lambda: True
    """Whether a state may be committed: not while the run record lags behind it.

    Only rank 0 calls it: its record is the run's, and a refusal on any one rank would cost all ranks the state.
    """
    on_saved: Callable[[int, float], None] = ignore
    """Called with the step and the seconds of a durable checkpoint that was written."""
    on_replica: Callable[[SentReplica], None] = ignore
    """Called with each state that other nodes now keep too."""
    on_phase: Callable[[CheckpointPhase], None] = ignore
    """Called at each phase of saving and before a state is loaded; fault injection uses it."""
