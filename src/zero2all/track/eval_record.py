"""The evaluations of a run's checkpoints and their trends: ``evals.jsonl`` beside the run record.

A line is one value: ``{"version": 1, "kind": "probes", "suite": "stories", "name": "sum-en", "step": 400, "value": 0.7,
"metric": "probability", "better": "higher", "group": "en arithmetic", "digest": …, "time": …}``. The training process
never writes this file; a lock keeps evaluations of several processes apart. Of several values of the same name and
step the last counts, and only values with the ``digest`` of the last one: those before were measured with another
definition.

A trend is a Mann-Kendall test, corrected for many tests by Holm. Its p-value is the chance of such a trend among values
in random order. Checkpoints of one run follow from each other, so a value that drifts for no reason passes more often
than the p-value says: compare with another seed before you believe a single curve.
"""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field

from zero2all.base.directory_lock import NO_FLOCK_ERRNOS
from zero2all.base.errors import Z2aError
from zero2all.base.records import parse_record
from zero2all.base.units import show_bytes
from zero2all.track.record_lines import (
    MAX_STEP,
    MAX_TIME,
    EventLine,
    InvalidLineError,
    LineReader,
    parse_json_line,
    restart_step,
)
from zero2all.track.run_locations import EVALS_FILE, RunLocation
from zero2all.track.run_record import AppendFile


@dataclass(frozen=True, kw_only=True)
class LossMetrics:
    """The loss on some text. What records of earlier versions lack is None.

    Bits per byte do not depend on the vocabulary, so that models with different tokenizers can be compared; loss and
    perplexity do.
    """

    bits_per_byte: float
    bytes: int
    """Size of the scored text."""
    loss: float | None = None
    """Nats per token."""
    perplexity: float | None = None
    """exp(loss), if that is a number."""
    tokens: int | None = None
    """Tokens that were scored: all but end-of-text tokens."""
    num_documents: int | None = None
    bits_per_byte_error: float | None = None
    """Standard error of bits per byte over documents; None for a single document that is too short to divide."""
    loss_error: float | None = None
    """Standard error of the loss over documents."""
    unigram_bits_per_byte: float | None = None
    """The value for a model that gives each token its share of the training tokens; None without training tokens."""
    below_unigram: float | None = None
    """How much better the model is than the unigram model, as a share."""


@dataclass(frozen=True, kw_only=True)
class LossEvaluation(LossMetrics):
    """The loss over all sources of the validation set; where there is none, over all test sets."""

    sources: dict[str, LossMetrics]
    """One entry per source of the validation set."""
    test_sets: dict[str, LossMetrics] = field(default_factory=dict)
    scoring: str | None = None
    """How the text was divided, in words."""


MAX_EXACT = 60  # values; with more, or with equal ones, the normal approximation is as good
MIN_POINTS = 3

SIGNIFICANT = 0.05  # below this p-value a trend counts


@dataclass(frozen=True)
class Trend:
    """How consistently values rise."""

    tau: float
    """Kendall's tau: 1 if every value is above all earlier ones, -1 if below."""
    p: float
    """One-sided: the probability of a tau at least as large if the order were random."""


def mann_kendall(values: Sequence[float]) -> Trend | None:
    """The trend of values in the order of time; None for fewer than three.

    >>> mann_kendall([0.1, 0.3, 0.2, 0.5, 0.6])
    Trend(tau=0.8, p=0.041666666666666664)
    """
    column = np.asarray(values, dtype=np.float64)
    count = len(column)
    if count < MIN_POINTS:
        return None
    pairs = count * (count - 1) // 2
    score = int(np.sign(column[None] - column[:, None])[np.triu_indices(count, 1)].sum())
    _, ties = np.unique(column, return_counts=True)
    if count <= MAX_EXACT and ties.max() == 1:
        inversions = (pairs - score) // 2  # of the values in the wrong order
        return Trend(score / pairs, float(_inversion_shares(count)[: inversions + 1].sum()))
    weights = count * (count - 1) * (2 * count + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())
    deviation = math.sqrt(weights / 18)
    # A tau of 0 is the middle; the correction of 1 makes the continuous distribution as wide as the discrete one.
    z = 0.0 if deviation == 0 else (score - np.sign(score)) / deviation
    return Trend(score / pairs, 0.5 * math.erfc(z / math.sqrt(2)))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values for several tests at once: below 0.05, the chance of any false one among them is below 5%.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


@lru_cache(maxsize=MAX_EXACT)
def _inversion_shares(count: int) -> np.ndarray[Any, Any]:
    """The share of the orders of ``count`` values that have 0, 1, 2, ... pairs in the wrong order."""
    shares = np.ones(1)
    for size in range(2, count + 1):
        shares = np.convolve(shares, np.full(size, 1 / size))
    return shares


MAX_NAME = 120  # characters
MAX_FILE_BYTES = 256 * 2**20  # the rest is not read
RESERVED = frozenset("/@")  # separate the parts of a metric's name


def _check_name(text: str) -> str:
    if RESERVED & set(text) or not text.isprintable():
        raise ValueError("is not a name")
    return text


OptionalName = Annotated[str, Field(strict=True, max_length=MAX_NAME), AfterValidator(_check_name)]
Name = Annotated[OptionalName, Field(min_length=1)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class EvalLine:
    """One value of one checkpoint."""

    version: Literal[1] = 1
    kind: Name
    """What was evaluated: ``probes``, ``loss`` or ``bench``."""
    suite: Name
    name: Name
    step: Annotated[int, Field(strict=True, ge=0, le=MAX_STEP)]
    """The number of steps that the checkpoint was trained for."""
    value: Finite
    metric: Name
    """What the value is, such as ``probability``."""
    better: Literal["higher", "lower"]
    group: OptionalName = ""
    """Values of a group share a chart."""
    digest: OptionalName = ""
    """Fingerprint of what was measured: values with different ones cannot be compared."""
    error: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = None
    """Half of the 95% confidence interval."""
    time: Annotated[float, Field(strict=True, ge=-MAX_TIME, le=MAX_TIME)]
    """When it was evaluated, in seconds since the epoch."""


@dataclass(frozen=True, kw_only=True)
class EvalCurve:
    """A value over the checkpoints of a run."""

    kind: str
    suite: str
    name: str
    group: str
    metric: str
    better: Literal["higher", "lower"]
    steps: list[int]
    times: list[float]
    values: list[float]
    errors: list[float | None]
    """Half of the 95% confidence interval of each value, if it is known."""
    tau: float | None = None
    """Kendall's tau in the direction that is better; None with fewer than three checkpoints."""
    p: float | None = None
    """p-value of the one-sided trend test, corrected for the number of curves in the suite."""

    @property
    def metric_name(self) -> str:
        """Its name among the metrics of the run."""
        about = ", ".join(filter(None, (self.group, self.metric)))
        return f"{self.kind}/{self.suite}: {about}/{self.name}"


def append_evals(directory: Path, lines: Iterable[EvalLine]) -> None:
    """Add lines to the evaluations of the run in ``directory``; all of them, also beside another process."""
    data = b"".join(json.dumps(asdict(line), ensure_ascii=False).encode() + b"\n" for line in lines)
    with open(directory / EVALS_FILE, "ab") as locked:
        try:
            fcntl.flock(locked, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_FLOCK_ERRNOS:
                raise
        file = AppendFile(directory / EVALS_FILE)  # while it is locked: this looks at the last line
        try:
            file.put(data)
            file.write()
            file.sync()
        finally:
            file.close()


class EvalReader:
    """Follows the evaluations of a run.

    >>> reader = EvalReader(LocalRunLocation(Path("runs/first/run")))
    >>> reader.refresh(reader.location.file_sizes())
    >>> reader.curves()[0].values
    """

    def __init__(self, location: RunLocation) -> None:
        self.location = location
        self._reset()

    def _reset(self) -> None:
        self._lines: dict[tuple[str, str, str, int], EvalLine] = {}  # the last of each
        self._reader = LineReader()
        self.version = 0  # changes with every line
        self.skipped_lines = 0
        self.damage: str | None = None  # where the first invalid line is, and why
        self._curves: tuple[object, list[EvalCurve]] = (None, [])  # and what they depend on

    def refresh(self, sizes: dict[str, int]) -> bool:
        """Read what was written since the last call. Returns whether there was anything."""
        size, before = sizes.get(EVALS_FILE, 0), self._reader.offset
        if size < before:  # the file was replaced
            self._reset()
        if size > MAX_FILE_BYTES:
            self.damage = self.damage or f"only the first {show_bytes(MAX_FILE_BYTES)} are read"
        for start, _, raw in self._reader.read_lines(self._read, min(size, MAX_FILE_BYTES)):
            self.version += 1
            try:
                line = _parse_eval_line(raw)
            except InvalidLineError as error:
                self.skipped_lines += 1
                self.damage = self.damage or f"byte {start}: {error}"
                continue
            key = (line.kind, line.suite, line.name, line.step)
            self._lines.pop(key, None)  # so that the last one written is the last one here
            self._lines[key] = line
        return self._reader.offset != before

    def _read(self, start: int, length: int) -> bytes:
        return self.location.read(EVALS_FILE, start, length)

    def curves(self, events: Sequence[EventLine] = ()) -> list[EvalCurve]:
        """A curve for each name, with its trend. ``events`` of the run record tell which checkpoints it abandoned."""
        restarts = [(step, event.time or 0.0) for event in events if (step := restart_step(event)) is not None]
        key = (self.version, restarts)
        if self._curves[0] != key:
            current = [
                line
                for line in self._lines.values()
                if not any(line.step > step and line.time < time for step, time in restarts)
            ]
            self._curves = key, eval_curves(current)
        return self._curves[1]


def eval_curves(lines: Iterable[EvalLine]) -> list[EvalCurve]:
    """A curve for each name, with its trend, from lines in the order in which they were written."""
    by_name: dict[tuple[str, str, str], dict[int, EvalLine]] = {}
    for line in lines:
        by_step = by_name.setdefault((line.kind, line.suite, line.name), {})
        by_step.pop(line.step, None)  # so that the last one written is the last one here
        by_step[line.step] = line
    curves = [_to_curve(list(by_step.values())) for by_step in by_name.values()]
    return _with_trends(sorted(curves, key=lambda curve: (curve.kind, curve.suite)))


def _to_curve(lines: list[EvalLine]) -> EvalCurve:
    last = lines[-1]
    same = sorted((line for line in lines if line.digest == last.digest), key=lambda line: line.step)
    return EvalCurve(
        kind=last.kind,
        suite=last.suite,
        name=last.name,
        group=last.group,
        metric=last.metric,
        better=last.better,
        steps=[line.step for line in same],
        times=[line.time for line in same],
        values=[line.value for line in same],
        errors=[line.error for line in same],
    )


def _with_trends(curves: list[EvalCurve]) -> list[EvalCurve]:
    """Add the trend of each curve; the correction is over the curves of a suite."""
    found: list[EvalCurve] = []
    for suite in dict.fromkeys((curve.kind, curve.suite) for curve in curves):
        own = [curve for curve in curves if (curve.kind, curve.suite) == suite]
        signs = [1 if curve.better == "higher" else -1 for curve in own]
        trends = [
            mann_kendall([sign * value for value in curve.values]) for sign, curve in zip(signs, own, strict=True)
        ]
        corrected = iter(holm([trend.p for trend in trends if trend is not None]))
        for curve, trend in zip(own, trends, strict=True):
            found.append(curve if trend is None else replace(curve, tau=trend.tau, p=next(corrected)))
    return found


def _parse_eval_line(raw: bytes | None) -> EvalLine:
    """A line in which every value has the expected type."""
    try:
        return parse_record(EvalLine, parse_json_line(raw), EVALS_FILE)
    except Z2aError as error:
        raise InvalidLineError(str(error)) from error
