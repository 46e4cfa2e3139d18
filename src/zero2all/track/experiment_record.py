"""``experiment.json``: the variants of an experiment, what became of each, and a summary of the results.

Whoever shows an experiment reads this file, which may come from anybody: it is bounded in size and checked on reading.
"""

from __future__ import annotations

import json
import math
import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from zero2all.base.charts.plot import Finite, Plot
from zero2all.base.console import sanitize
from zero2all.base.errors import Z2aError
from zero2all.base.records import map_texts, parse_record, to_json
from zero2all.track.run_locations import LocalRunLocation, RunLocation, SshRunLocation
from zero2all.track.ssh import UnreachableError

EXPERIMENT_FILE = "experiment.json"
FORMAT: Literal[1] = 1
MAX_FILE_BYTES = 8 * 2**20
MAX_VARIANTS = 5000
BITS_PER_BYTE = "bits_per_byte"  # the metric by which variants are compared: lower is better
MIXTURE_SEARCH = "mixture-search"
LADDER = "ladder"
LADDER_PARAMETERS, LADDER_COMPUTE, LADDER_TARGET = "parameters", "training_flops", "is_predicted"
"""Values of each variant of a ladder, beside its width."""
MAX_BITS_PER_BYTE = 1e6  # more is damage
VariantState = Literal["planned", "running", "stopped", "done", "failed"]
DirectoryName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=200)]


@dataclass(frozen=True)
class VariantResult:
    """What training and evaluation of a variant gave."""

    steps: int
    tokens: int
    seconds: Finite
    """Wall time of training, over all restarts."""
    tokens_per_second: Finite
    metrics: dict[str, Finite]
    """Metrics of the last checkpoint, ``bits_per_byte`` on the validation set among them."""
    best_bits_per_byte: Finite
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
    """Directory of the run, inside the experiment's directory."""
    group: str
    """Runs of a group differ only in their seed."""
    seed: int
    recipe: str
    """The recipe file that was given."""
    overrides: list[str]
    values: dict[str, int | Finite | str]
    """Values of the keys that the experiment varies."""
    key: str
    """Fingerprint of all that decides the result, except the budget."""
    steps: int | None = None
    """Number of steps, where a time budget fixes it."""
    state: VariantState = "planned"
    reason: str = ""
    """Why it failed."""
    result: VariantResult | None = None

    def bits_per_byte(self, target: Mapping[str, float]) -> float | None:
        """Weighted mean over the validation sources of a target; with an empty target, over all validation text.

        None without a plausible result.
        """
        metrics = {} if self.result is None else self.result.metrics
        weights = {f"{BITS_PER_BYTE}/{source}": weight for source, weight in target.items()} or {BITS_PER_BYTE: 1.0}
        total = sum(weight * metrics.get(name, math.nan) for name, weight in weights.items())
        value = total / sum(weights.values())
        return value if 0 <= value < MAX_BITS_PER_BYTE else None


@dataclass(frozen=True)
class Verdict:
    """How the bits per byte of two groups differ: ``other`` minus ``reference``."""

    reference: str
    other: str
    difference: Finite
    margin: Finite | None
    """Half the width of the 95% confidence interval; None if the noise between seeds is unknown."""

    @property
    def is_beyond_noise(self) -> bool:
        return self.margin is not None and abs(self.difference) > self.margin


@dataclass(frozen=True)
class GroupSummary:
    """Runs that differ only in their seed. Means over those with a result."""

    group: str
    runs: int
    """Number of runs."""
    seeds: list[int]
    """Seeds of the runs with a result."""
    problems: list[str]
    """Problems of the runs without a result."""
    bits_per_byte: Finite | None = None
    spread: Finite | None = None
    """Standard deviation between seeds; None with fewer than two."""
    best_bits_per_byte: Finite | None = None
    steps: int | None = None
    tokens: int | None = None
    tokens_per_second: Finite | None = None
    seconds: Finite | None = None


@dataclass(frozen=True)
class MixtureSource:
    """What a mixture search says about a source of training text."""

    source: str
    recipe: Finite
    """Its share in the recipe."""
    suggested: Finite | None
    """Its share in the suggested mixture; None without a suggestion."""
    effect: Finite
    """Change of the target, in bits per byte, if this share rises by 1% of the tokens and the others make room in
    proportion, from the mixture of the recipe on."""
    low: Finite
    """The 95% interval of the effect."""
    high: Finite
    effects: dict[str, Finite]
    """The same change of each validation source of the target."""


@dataclass(frozen=True)
class MixtureFit:
    """The response of a target to the mixture, fitted to the runs of a mixture search."""

    mixtures: int
    """Number of mixtures in the fit."""
    error: Finite
    """Root mean square of the leave-one-out errors, in bits per byte."""
    mean_error: Finite
    """The same with the mean as the prediction."""
    rank_correlation: Finite
    """Spearman's, between measured and leave-one-out predictions."""
    recipe_bits_per_byte: Finite
    """Predicted target with the mixture of the recipe."""
    suggested_bits_per_byte: Finite | None
    """Predicted target with the suggested mixture; None if the fit is not good enough for a suggestion."""
    sources: list[MixtureSource]


@dataclass(frozen=True)
class ExperimentRecord:
    format: Literal[1]
    name: DirectoryName
    kind: str
    """compare, sweep, mixture-search, ladder, or runs (that existed)."""
    keys: list[str]
    """Recipe keys that are varied; empty if the variants are recipes of their own."""
    budget: str | None
    """Budget of each run, as given; None: the length in the recipe."""
    target: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = field(default_factory=dict)
    """Weights of the validation sources by whose mean the variants are compared; empty: all validation text."""
    step_seconds: dict[str, Finite] = field(default_factory=dict)
    """Measured for a time budget, by what decides the speed."""
    variants: Annotated[list[VariantRecord], Field(max_length=MAX_VARIANTS)] = field(default_factory=list)
    groups: list[GroupSummary] = field(default_factory=list)
    """The groups; in a sweep, the best one is first."""
    verdicts: list[Verdict] = field(default_factory=list)
    """Comparisons of groups that have results."""
    plot: Plot | None = None
    """Bits per byte over the values of a sweep, or over the compute of a ladder."""
    fit: MixtureFit | None = None
    """The fit of a mixture search whose runs have ended."""

    @property
    def is_sweep(self) -> bool:
        """Whether its variants are of one recipe, so that the best one is sought."""
        return self.kind in ("sweep", MIXTURE_SEARCH)

    def values_by_group(self) -> dict[str, list[float]]:
        """Bits per byte of the runs that have them."""
        values: dict[str, list[float]] = {}
        for variant in self.variants:
            value = variant.bits_per_byte(self.target)
            if value is not None:
                values.setdefault(variant.group, []).append(value)
        return values


@dataclass(frozen=True)
class ShownExperiment:
    """An experiment for the page: its record, or why it cannot be read."""

    name: str
    runs: dict[str, int]
    """Numbers of the runs that are shown, by variant."""
    record: Any
    """The record as JSON, with texts that are safe to show, or None."""
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
    """The experiments that runs belong to: the record is in the parent of a run's directory."""
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
        if data is None:
            return None
        return ShownExperiment(name, runs, map_texts(to_json(parse_experiment(data, EXPERIMENT_FILE)), sanitize))
    except UnreachableError:  # nobody knows whether there is one; the card of the run says why
        return None
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
