"""``experiment.json``: the variants of an experiment, what became of each, and how their results differ.

Whoever shows an experiment reads this file, which may come from anybody: it is bounded in size and checked on reading.
"""

from __future__ import annotations

import json
import math
import posixpath
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from zero2all.console import sanitize
from zero2all.errors import Z2aError
from zero2all.records import parse_record
from zero2all.track.run_locations import LocalRunLocation, RunLocation, SshRunLocation

EXPERIMENT_FILE = "experiment.json"
FORMAT: Literal[1] = 1
MAX_FILE_BYTES = 8 * 2**20
MAX_VARIANTS = 5000
BITS_PER_BYTE = "bits_per_byte"  # the metric by which variants are compared: lower is better
MAX_BITS_PER_BYTE = 1e6  # more is damage
VariantState = Literal["planned", "running", "stopped", "done", "failed"]
DirectoryName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=200)]


@dataclass(frozen=True)
class VariantResult:
    """What training and evaluation of a variant gave."""

    steps: int
    tokens: int
    seconds: float
    """Wall time of training, over all restarts."""
    tokens_per_second: float
    metrics: dict[str, float]
    """Of the last checkpoint, ``bits_per_byte`` on the validation set among them."""
    best_bits_per_byte: float
    best_step: int
    validation_set: str
    """Fingerprint of the validation text, whatever the tokenizer."""
    validation_bytes: int
    """How much of it was used."""
    tokenizer: str
    """Fingerprint of the tokenizer."""


@dataclass(frozen=True)
class VariantRecord:
    """One run of an experiment."""

    name: DirectoryName
    """Directory of the run, below that of the experiment."""
    group: str
    """Runs of a group differ only in their seed."""
    seed: int
    recipe: str
    """The recipe file that was given."""
    overrides: list[str]
    values: dict[str, int | float | str]
    """Of the keys that the experiment varies."""
    key: str
    """Fingerprint of all that decides the result, except the budget."""
    steps: int | None = None
    """Number of steps, where a time budget fixes it."""
    state: VariantState = "planned"
    reason: str = ""
    """Why it failed."""
    result: VariantResult | None = None

    @property
    def bits_per_byte(self) -> float | None:
        """None without a plausible result."""
        value = math.nan if self.result is None else self.result.metrics.get(BITS_PER_BYTE, math.nan)
        return value if 0 <= value < MAX_BITS_PER_BYTE else None


@dataclass(frozen=True)
class Verdict:
    """How the bits per byte of two groups differ: ``other`` minus ``reference``."""

    reference: str
    other: str
    difference: float
    margin: float | None
    """Half the width of the 95 % confidence interval; None if the noise between seeds is unknown."""

    @property
    def is_beyond_noise(self) -> bool:
        return self.margin is not None and abs(self.difference) > self.margin


@dataclass(frozen=True)
class ExperimentRecord:
    format: Literal[1]
    name: DirectoryName
    kind: str
    """What made it, such as compare or sweep."""
    keys: list[str]
    """Recipe keys that are varied; empty if the variants are recipes of their own."""
    budget: str | None
    """Of each run, as given; None: the length in the recipe."""
    step_seconds: dict[str, float] = field(default_factory=dict)
    """Measured for a time budget, by what decides the speed."""
    variants: Annotated[list[VariantRecord], Field(max_length=MAX_VARIANTS)] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    """Of the groups with results."""

    def values_by_group(self) -> dict[str, list[float]]:
        """Bits per byte of the runs that have them."""
        values: dict[str, list[float]] = {}
        for variant in self.variants:
            if variant.bits_per_byte is not None:
                values.setdefault(variant.group, []).append(variant.bits_per_byte)
        return values


@dataclass(frozen=True)
class ShownExperiment:
    """An experiment for the page: its record, or why it cannot be read."""

    name: str
    runs: dict[str, int]
    """Numbers of the runs that are shown, by variant."""
    record: ExperimentRecord | None
    trouble: str = ""


def read_experiment(path: Path) -> ExperimentRecord:
    with open(path, "rb") as stream:
        return parse_experiment(stream.read(MAX_FILE_BYTES + 1), path)


def parse_experiment(data: bytes, source: object) -> ExperimentRecord:
    if len(data) > MAX_FILE_BYTES:
        raise Z2aError(f"{source} is larger than {MAX_FILE_BYTES >> 20} MiB: it is not the record of an experiment")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Z2aError(f"{source} is damaged: {str(error)[:200] or 'nested too deeply'}") from error
    return parse_record(ExperimentRecord, value, source)


def find_experiments(locations: Iterable[RunLocation]) -> list[ShownExperiment]:
    """The experiments that runs belong to: the record is in the directory above that of the run."""
    runs_of: dict[tuple[object, str], dict[str, int]] = {}
    found: dict[tuple[object, str], RunLocation] = {}
    for number, location in enumerate(locations):
        if isinstance(location, LocalRunLocation | SshRunLocation):
            directory, name = posixpath.split(str(location.directory).rstrip("/"))
            place = (getattr(location, "connection", None), directory)
            runs_of.setdefault(place, {})[name] = number
            found.setdefault(place, location)
    shown = (_show_experiment(location, place[1], runs_of[place]) for place, location in found.items())
    return [experiment for experiment in shown if experiment is not None]


def _show_experiment(location: RunLocation, directory: str, runs: dict[str, int]) -> ShownExperiment | None:
    name = sanitize(posixpath.basename(directory))
    try:
        data = _read_file(location, directory)
        return None if data is None else ShownExperiment(name, runs, parse_experiment(data, EXPERIMENT_FILE))
    except Z2aError as error:
        return ShownExperiment(name, runs, None, sanitize(str(error)))


def _read_file(location: RunLocation, directory: str) -> bytes | None:
    if isinstance(location, SshRunLocation):
        if EXPERIMENT_FILE not in location.connection.file_sizes(directory, [EXPERIMENT_FILE]):
            return None
        return location.connection.read(f"{directory}/{EXPERIMENT_FILE}", 0, MAX_FILE_BYTES + 1)
    path = Path(directory, EXPERIMENT_FILE)
    if not path.is_file() or path.is_symlink():
        return None
    try:
        with open(path, "rb") as stream:
            return stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise Z2aError(str(error)) from error
