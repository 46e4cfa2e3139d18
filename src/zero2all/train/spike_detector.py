"""The spike guard: detects steps whose loss or gradient norm is an outlier among recent steps.

Both directions count: garbage makes the loss jump, repetitive text makes it drop. A value is compared with a baseline,
the median of the last few steps. Its difference is compared with the differences of many earlier steps, by median and
median absolute deviation, so that neither a falling loss nor one earlier outlier moves the limit. Every rank sees the
same metrics and decides the same.

The report of an outlier names the documents of its batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from zero2all.base.console import warn
from zero2all.checkpoint.training_state import GuardState
from zero2all.recipe import GuardRecipe
from zero2all.tokens import DocumentSpan
from zero2all.track import RunRecord
from zero2all.train.data_loader import Batch

BASELINE_WINDOW = 9  # steps whose median is the baseline
MIN_DIFFERENCES = 24  # differences from it that are needed before an outlier is reported
MAD_TO_STD = 1.4826  # median absolute deviation to the standard deviation of a normal distribution
DETECTION_DELAY = 2  # steps between bad data and its detection
MIN_LOSS_CHANGE = 0.1  # a smaller relative change of the loss is never an outlier
MIN_NORM_FACTOR = 5.0  # nor is a change of the gradient norm by a smaller factor
RECORDED = ("gid", "source", "title", "shard")  # of a document
MAX_RECORDED_DOCUMENTS = 50  # in the record; 'z2a blame' lists all by loss
MAX_PRINTED_DOCUMENTS = 3  # on the terminal
MAX_SAMPLES_READ = 64  # of a batch: each lookup reads a shard's index, some 10 ms while all ranks wait


@dataclass
class RollingBaseline:
    """The recent values of one metric."""

    window: int
    threshold: float
    values: deque[float] = field(default_factory=deque)

    def is_outlier(self, value: float, min_difference: float) -> bool:
        """Whether a value is off the baseline by more than the threshold, and by at least ``min_difference``."""
        if len(self.values) < BASELINE_WINDOW + MIN_DIFFERENCES:
            return False
        known = np.array(self.values)
        baseline = np.median(sliding_window_view(known, BASELINE_WINDOW), axis=-1)
        differences = known[BASELINE_WINDOW:] - baseline[:-1]
        usual = float(np.median(differences))
        deviation = MAD_TO_STD * float(np.median(np.abs(differences - usual)))
        return abs(value - float(baseline[-1]) - usual) > max(min_difference, self.threshold * deviation)

    def add(self, value: float) -> None:
        self.values.append(value)
        while len(self.values) > self.window + BASELINE_WINDOW:
            self.values.popleft()


class SpikeDetector:
    """
    >>> guard = SpikeDetector(GuardRecipe(policy="skip"))
    >>> guard.check(step=100, stage=0, loss=9.7, grad_norm=0.8)
    'loss 9.7000, expected about 3.1000'
    """

    def __init__(self, recipe: GuardRecipe) -> None:
        self.recipe = recipe
        self._loss = RollingBaseline(recipe.window, recipe.threshold)
        self._norm = RollingBaseline(recipe.window, recipe.threshold)
        self._stage = -1

    def check(self, step: int, stage: int, loss: float, grad_norm: float) -> str | None:
        """Why a step is an outlier, before its update; None if it is not. A new stage starts a new baseline."""
        if stage != self._stage:
            self._stage = stage
            self._loss.values.clear()
            self._norm.values.clear()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return f"loss {loss}, gradient norm {grad_norm}"
        norm = math.log(max(grad_norm, 1e-30))
        reason = None
        if self._loss.is_outlier(loss, MIN_LOSS_CHANGE * float(np.median(self._loss.values or [0.0]))):
            usual = float(np.median(list(self._loss.values)[-BASELINE_WINDOW:]))
            reason = f"loss {loss:.4f}, expected about {usual:.4f}"
        elif self._norm.is_outlier(norm, math.log(MIN_NORM_FACTOR)):
            usual = math.exp(float(np.median(list(self._norm.values)[-BASELINE_WINDOW:])))
            reason = f"gradient norm {grad_norm:.4g}, expected about {usual:.4g}"
        # With policy warn an outlier joins the baseline, so that a lasting change is reported only at first.
        if reason is None or self.recipe.policy == "warn":
            self._loss.add(loss)
            self._norm.add(norm)
        return reason

    def state(self) -> GuardState:
        return GuardState(self._stage, list(self._loss.values), list(self._norm.values))

    def load_state(self, state: GuardState) -> None:
        self._stage = state.stage
        self._loss.values, self._norm.values = deque(state.loss), deque(state.norm)


def batch_documents(batch: Batch) -> list[DocumentSpan]:
    """Documents of a batch over all ranks, each once, most tokens first; of a large batch, a sample."""
    tokens: dict[str, int] = {}
    documents: dict[str, DocumentSpan] = {}
    start, stop = batch.sample_range
    count = min(stop - start, MAX_SAMPLES_READ)
    for number in range(count):
        sample = start + number * (stop - start) // count
        for span in batch.stage.dataset.documents(sample, sample + 1):
            tokens[span.gid] = tokens.get(span.gid, 0) + span.tokens
            documents[span.gid] = span
    return [documents[gid] for gid in sorted(documents, key=lambda gid: -tokens[gid])]


def shown_norms(layer_norms: Iterable[float]) -> list[float | None]:
    """For the record, which has no NaN in an event."""
    return [float(f"{norm:.4g}") if math.isfinite(norm) else None for norm in layer_norms]


def report_spike(
    batch: Batch, reason: str, policy: str, layer_norms: Iterable[float], run_directory: Path, record: RunRecord
) -> None:
    documents = batch_documents(batch)
    recorded = [{key: getattr(one, key) for key in RECORDED} for one in documents[:MAX_RECORDED_DOCUMENTS]]
    norms = shown_norms(layer_norms)
    record.event("spike", step=batch.step, reason=reason, policy=policy, layer_norms=norms, documents=recorded)
    first = ", ".join(document.title or document.gid for document in documents[:MAX_PRINTED_DOCUMENTS])
    warn(
        f"step {batch.step}: {reason}; documents of the batch: {first}, …; 'z2a blame {run_directory} "
        f"--step {batch.step}' lists all of them by loss"
    )


def lower_lr_hint(run_directory: Path, step: int) -> str:
    command = f"z2a blame {run_directory} --step {step} --no-loss"
    return f"try a lower learning rate or a longer warmup; '{command}' shows its text"


def format_ranges(steps: Iterable[int]) -> str:
    """
    >>> format_ranges([3, 4, 5, 9])
    '3-5, 9'
    """
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
