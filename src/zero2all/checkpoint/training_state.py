"""Records of a checkpoint's JSON files: the training state beside the tensors, and a run's identity and lineage; and
the callbacks by which a checkpoint manager reports to its owner.

Step numbers alone do not identify a state: lost steps are repeated, with other results. Every start of a run, and every
rollback, begins a history with a random id. A lineage lists the histories that a state went through, oldest first, each
with the step at which it began: ``((a1, 0), (b2, 900))`` means that history b2 began from the state of step 900 of
history a1. What a1 did after step 900 is not part of it: it was abandoned.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from zero2all.base.io import HISTORY_FILE, read_record
from zero2all.base.records import RestoreSummary

RopeScalingValues = dict[str, str | int | float | None]
"""``recipe.RopeScaling`` as JSON."""


@dataclass(frozen=True)
class StageIdentity:
    """The values that decide which samples the steps of a stage take and how their positions are encoded."""

    name: str
    first_step: int
    samples: str
    """Fingerprint of the dataset."""
    batch: list[int]
    """Batch size, the first two offsets of its ramp, steps of the ramp."""
    rope: list[float | RopeScalingValues | None]
    """RoPE theta and scaling that the stage sets."""
    settings: dict[str, Any] = field(default_factory=dict, compare=False)
    """The keys of the recipe that decide the values above, for messages."""


@dataclass(frozen=True)
class RunIdentity:
    """``identity.json``: a run resumes only with the same values."""

    stages: list[StageIdentity]
    tokenizer: str
    """Fingerprint of the tokenizer."""
    model: dict[str, Any]
    """``recipe.ModelConfig`` as JSON, without preset and ops."""
    optimizer: str
    init: str | None = field(default=None, kw_only=True)
    """``train.init``: what the run began with, as an absolute path."""
    settings: dict[str, Any] = field(default_factory=dict, kw_only=True)
    """All other keys that affect training (``recipe.run_settings``)."""


@dataclass(frozen=True)
class InitialWeights:
    """``init.json``: the weights that a run began with."""

    path: str
    """The checkpoint or Hugging Face directory."""
    step: int | None
    """Step of the checkpoint; None for a Hugging Face directory."""
    dtype: str
    """The dtype in which they are stored; a run has its weights in fp32, with adamw-bf16 in bf16."""
    new_tokens: int
    """Rows that were added to the vocabulary."""
    seeded: list[str]
    """Weights that were not stored, and were drawn from the seed."""
    fingerprint: str | None
    """Fingerprint of the checksums of all files; None in a dry run, which does not read them."""


@dataclass(frozen=True)
class RopeState:
    """RoPE of the stage in which the state was saved; a stage may change the model's RoPE."""

    rope_theta: float
    rope_scaling: RopeScalingValues | None


@dataclass(frozen=True)
class GuardState:
    """Recent values of the spike guard."""

    stage: int
    """First step of the stage in which they were measured."""
    loss: list[float]
    norm: list[float]
    """Logarithms of gradient norms."""


@dataclass(frozen=True)
class LossScaleState:
    """Dynamic loss scale of fp16."""

    value: float
    fitted: int
    """Number of steps without an overflow since it changed."""


@dataclass(frozen=True)
class IslandsState:
    """Progress of the exchanges between islands."""

    exchange: int
    """The last one that all islands present have completed; -1 if none."""
    merge_at: int | None = None
    """The step after which it will be merged into the weights; None if it already is."""


@dataclass(frozen=True)
class TrainingState(RunIdentity):
    """The state that training needs to resume, beside the tensors."""

    rope: RopeState
    guard: GuardState
    loss_scale: LossScaleState | None = None
    skipped: list[int] = field(default_factory=list)
    """Steps that are skipped, since their data is bad."""
    islands: IslandsState | None = None
    """Progress of the exchanges, if there are several islands."""
    permanent: bool = False
    """True if retention never removes it."""
    bits_per_byte: float | None = None
    """Bits-per-byte of the validation after this step, if there was one."""


MAX_HISTORIES = 256  # in a lineage; a restart needs no older ones


class Branch(NamedTuple):
    history: str
    first_step: int
    """The step at which it branched off from the previous history."""


Lineage = tuple[Branch, ...]
SavedLineage = Annotated[Lineage, Field(min_length=1)]
UNKNOWN_LINEAGE: Lineage = (Branch("unknown", 0),)
"""Lineage of durable checkpoints written before histories were recorded."""


def new_history_id() -> str:
    return secrets.token_hex(6)


def extend_lineage(lineage: Lineage, step: int, history: str) -> Lineage:
    """The lineage of a new history that begins from the state of ``step`` at the end of ``lineage``."""
    return (*lineage, Branch(history, step))[-MAX_HISTORIES:]


def contains_state(lineage: Lineage, step: int, history: str) -> bool:
    """Return whether ``lineage`` contains the state of ``step`` of ``history``, or will once it reaches that step."""
    for number, branch in enumerate(lineage):
        if branch.history == history:
            until = lineage[number + 1].first_step if number + 1 < len(lineage) else math.inf
            return branch.first_step <= step <= until
    return False


def descends_from(lineage: Lineage, ancestor: Lineage) -> bool:
    """Return whether ``lineage`` branched off from the last history of ``ancestor``."""
    return any(branch.history == ancestor[-1].history for branch in lineage[:-1])


@dataclass(frozen=True)
class HistoryRecord:
    """``history.json``."""

    lineage: SavedLineage
    time: float = 0.0
    """Time at which its last history began."""
    restored: RestoreSummary | None = None


def read_lineage(run: Path) -> Lineage | None:
    """The lineage of the last start or rollback of a run; None if it has none."""
    path = run / HISTORY_FILE
    return read_record(HistoryRecord, path).lineage if path.exists() else None


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
    """Bytes sent over the network, to all holders together."""
    seconds: float
    lag: int
    """Steps by which it was behind the newest state in memory when it had arrived."""


@dataclass(frozen=True)
class CheckpointCallbacks:
    """Callbacks from the training thread and from background threads: they must be thread-safe."""

    on_wait: Callable[[], None] = ignore
    """A heartbeat, every second while training waits for storage: without it the wait would look like a hang."""
    before_commit: Callable[[], bool] = lambda: True
    """Returns whether a state may be committed: not while the run record lags behind it.

    Only rank 0 calls it: its record is the run's, and a refusal on any one rank would cost all ranks the state.
    """
    on_saved: Callable[[int, float], None] = ignore
    """Gets the step and the seconds of each durable checkpoint that was written."""
    on_replica: Callable[[SentReplica], None] = ignore
    """Gets each state that other nodes now keep too."""
    on_phase: Callable[[CheckpointPhase], None] = ignore
    """Gets each phase of saving, and of a state that is about to be loaded; fault injection uses it."""
