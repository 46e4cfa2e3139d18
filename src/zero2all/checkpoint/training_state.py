"""What a checkpoint holds beside the tensors, and the identity of a run: the records of its JSON files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RopeScalingValues = dict[str, str | int | float | None]
"""``recipe.RopeScaling`` as JSON."""


@dataclass(frozen=True)
class StageIdentity:
    """What decides which samples the steps of a stage take and how their positions are encoded."""

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
    """Of the checkpoint."""
    dtype: str
    """As they are stored; a run has its weights in fp32, with adamw-bf16 in bf16."""
    new_tokens: int
    """Rows that were added to the vocabulary."""
    seeded: list[str]
    """Weights that were not stored, and were drawn from the seed."""
    fingerprint: str | None
    """Of the checksums of all files; None in a dry run, which does not read them."""


@dataclass(frozen=True)
class RopeState:
    """RoPE of the stage in which the state was saved; a stage may change that of the model."""

    rope_theta: float
    rope_scaling: RopeScalingValues | None


@dataclass(frozen=True)
class GuardState:
    """Recent values of the spike guard."""

    stage: int
    """First step of the stage that they are of."""
    loss: list[float]
    norm: list[float]
    """Logarithms of gradient norms."""


@dataclass(frozen=True)
class LossScaleState:
    """Dynamic loss scale of fp16."""

    value: float
    fitted: int
    """Steps without an overflow since it changed."""


@dataclass(frozen=True)
class IslandsState:
    """How far the exchanges between islands are."""

    exchange: int
    """The last one that all islands present have completed; -1 if none."""
    merge_at: int | None = None
    """If it is not yet merged into the weights: after how many steps it will be."""


@dataclass(frozen=True)
class TrainingState(RunIdentity):
    """What training needs to resume, beside the tensors."""

    rope: RopeState
    guard: GuardState
    loss_scale: LossScaleState | None = None
    skipped: list[int] = field(default_factory=list)
    """Steps that are skipped, since their data is bad."""
    islands: IslandsState | None = None
    """If there are several."""
    permanent: bool = False
    """Never removed by retention."""
    bits_per_byte: float | None = None
    """Bits-per-byte of the validation after this step, if there was one."""
