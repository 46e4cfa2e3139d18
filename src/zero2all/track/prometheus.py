"""The runs of ``z2a watch`` in the text format of Prometheus, version 0.0.4.

Names in the files of a run were written by others: they are only ever label values, and the series of a run are
limited in number.

>>> exposition([run_series(run, run.status(), check_health(run))])
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from zero2all.base.console import sanitize
from zero2all.base.findings import Finding, Level
from zero2all.track.goodput import count_restarts
from zero2all.track.run_view import RunStatus, RunView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_SERIES = 10_000  # per run; what exceeds it is counted
MAX_LABEL = 200  # characters of a label value


@dataclass(frozen=True)
class MetricFamily:
    """A metric with its series; each has the label ``run``, then ``labels``."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: Literal["gauge", "counter"] = "gauge"


@dataclass(frozen=True)
class MetricSample:
    """A value of a run; ``labels`` in the order of the family's."""

    family: MetricFamily
    value: float
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunSeries:
    """The samples of a run; no two have the same family and labels."""

    run: str
    samples: list[MetricSample] = field(default_factory=list)


READABLE = MetricFamily("zero2all_readable", "1 if the files of the run can be read, else 0.")
ENDED = MetricFamily("zero2all_ended", "1 if the run is done, was stopped or has failed, else 0.")
STEP = MetricFamily("zero2all_step", "The last step, counted from 0.")
PLANNED_STEPS = MetricFamily("zero2all_planned_steps", "Steps of the run in all.")
TOKENS = MetricFamily("zero2all_tokens", "Tokens trained on, from the record or else from the recipe.")
LAST_STEP_TIME = MetricFamily("zero2all_last_step_timestamp_seconds", "When the last step was recorded.")
LAST_RECORD_TIME = MetricFamily("zero2all_last_record_timestamp_seconds", "When the last line was recorded.")
STEP_SECONDS = MetricFamily("zero2all_step_seconds", "Median duration of the last steps.")
REMAINING_SECONDS = MetricFamily("zero2all_remaining_seconds", "Estimated time to the last step.")
GOODPUT = MetricFamily("zero2all_goodput_ratio", "Share of the time that went into steps that count.")
RESTARTS = MetricFamily("zero2all_restarts_total", "Restarts after a failure or hang.", (), "counter")
FINDINGS = MetricFamily("zero2all_health_findings", "Findings of the health checks, by level.", ("level",))
SOURCE_LOSS = MetricFamily("zero2all_source_loss", "Training loss by source, in nats per token.", ("source",))
SOURCE_BPB = MetricFamily("zero2all_source_bpb", "Training loss by source, in bits per byte.", ("source",))
VALIDATION_BPB = MetricFamily(
    "zero2all_validation_bpb",
    "Validation loss in bits per byte: of all, of each source and of each test set.",
    ("name",),
)
VALIDATION_METRIC = MetricFamily("zero2all_validation_metric", "Validation metrics of the objective.", ("name",))
EVALUATION = MetricFamily(
    "zero2all_evaluation", "Newest value of each evaluation of checkpoints.", ("kind", "suite", "name", "metric")
)
OTHER_METRIC = MetricFamily("zero2all_metric", "Every other metric in the record.", ("name", "rank"))
DROPPED_SERIES = MetricFamily(
    "zero2all_dropped_series", f"Series left out: over {MAX_SERIES}, or a label over {MAX_LABEL} characters."
)

# Families of metrics in the record: of rank 0, of every rank, and by what comes after a prefix.
GLOBAL_METRICS = {
    "loss": MetricFamily("zero2all_loss", "Training loss; in nats per token unless the objective has another one."),
    "lr": MetricFamily("zero2all_learning_rate", "Learning rate."),
    "grad_norm": MetricFamily("zero2all_gradient_norm", "Global gradient norm before clipping."),
    "tokens_per_second": MetricFamily("zero2all_tokens_per_second", "Throughput of all ranks."),
    "tflops": MetricFamily("zero2all_tflops", "Model TFLOP/s of a device."),
    "mfu": MetricFamily("zero2all_mfu_ratio", "Model FLOPs utilization."),
    "mfu_palm": MetricFamily("zero2all_mfu_palm_ratio", "Model FLOPs utilization by PaLM's count, 6N + 12LHQT."),
    "hfu": MetricFamily("zero2all_hfu_ratio", "Hardware FLOPs utilization, which also counts recomputation."),
}
RANK_METRICS = {
    "memory": MetricFamily("zero2all_memory_bytes", "Peak memory of a rank.", ("rank",)),
    "memory_reserved": MetricFamily(
        "zero2all_memory_reserved_bytes", "Peak memory that the CUDA allocator of a rank holds.", ("rank",)
    ),
    "data_wait": MetricFamily(
        "zero2all_data_wait_ratio", "Share of the step time spent on waiting for data.", ("rank",)
    ),
    "checkpoint_stall": MetricFamily(
        "zero2all_checkpoint_stall_seconds", "How long the last checkpoint stalled training.", ("rank",)
    ),
}
PREFIXES = {"loss/": SOURCE_LOSS, "bpb/": SOURCE_BPB, "valid/": VALIDATION_METRIC}

FAMILIES = (
    READABLE, ENDED, STEP, PLANNED_STEPS, TOKENS, *GLOBAL_METRICS.values(), STEP_SECONDS, REMAINING_SECONDS,
    LAST_STEP_TIME, LAST_RECORD_TIME, GOODPUT, RESTARTS, FINDINGS, SOURCE_LOSS, SOURCE_BPB,
    VALIDATION_BPB, VALIDATION_METRIC, EVALUATION, *RANK_METRICS.values(), OTHER_METRIC, DROPPED_SERIES,
)  # fmt: skip
"""All families, in the order of the output."""


def run_series(run: RunView, status: RunStatus, findings: Sequence[Finding] = ()) -> RunSeries:
    """The samples of a run."""
    latest = {rank: reader.latest_values() for rank, reader in sorted(run.readers.items())}
    # If there are too many samples, the first are kept: the fixed families, then the other metrics of rank 0.
    samples = [*_status_samples(run, status, latest[0]), *_finding_samples(findings), *_validation_samples(run)]
    samples += [sample for rank, values in latest.items() for sample in _recorded_samples(rank, values)]
    kept: dict[tuple[str, tuple[str, ...]], MetricSample] = {}
    for sample in samples:
        if len(kept) < MAX_SERIES and all(len(label) <= MAX_LABEL for label in sample.labels):
            labels = tuple(map(_label_value, sample.labels))
            kept.setdefault((sample.family.name, labels), MetricSample(sample.family, sample.value, labels))
    dropped = MetricSample(DROPPED_SERIES, len(samples) - len(kept))
    return RunSeries(run.name, [*kept.values(), dropped])


def unreadable_run(run: str) -> RunSeries:
    """A run of which nothing can be said at the moment."""
    return RunSeries(run, [MetricSample(READABLE, 0)])


def family_text(name: str, kind: str, help_text: str, samples: Iterable[tuple[dict[str, str], float]]) -> str:
    """A metric with its samples, each with its labels."""
    lines = [f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"]
    for labels, value in samples:
        shown = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
        lines.append(f"{name}{f'{{{shown}}}' if labels else ''} {_number(value)}\n")
    return "".join(lines)


def exposition(runs: Iterable[RunSeries]) -> str:
    """The text of ``/metrics``. A run that has the name of another one before it gets a number."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {family.name: [] for family in FAMILIES}
    names: set[str] = set()
    for series in runs:
        name, number = _label_value(series.run), 1
        while name in names:
            number += 1
            name = f"{_label_value(series.run)} ({number})"
        names.add(name)
        for sample in series.samples:
            labels = dict(zip(("run", *sample.family.labels), (name, *sample.labels), strict=True))
            samples[sample.family.name].append((labels, sample.value))
    return "".join(
        family_text(family.name, family.kind, family.help, found)
        for family in FAMILIES
        if (found := samples[family.name])
    )


def _status_samples(run: RunView, status: RunStatus, latest: dict[str, float]) -> Iterator[MetricSample]:
    batch_tokens = run.metadata.batch_tokens
    tokens = None if status.step is None or batch_tokens is None else (status.step + 1) * batch_tokens
    values = {
        READABLE: status.trouble is None,
        ENDED: status.ended is not None,
        STEP: status.step,
        PLANNED_STEPS: status.steps,
        TOKENS: latest.get("tokens", tokens),
        STEP_SECONDS: status.step_seconds,
        REMAINING_SECONDS: status.seconds_left,
        GOODPUT: status.goodput,
        RESTARTS: count_restarts(run.events),
        LAST_STEP_TIME: status.time or None,  # 0 of a line without a time
        LAST_RECORD_TIME: run.readers[0].last_time,
        **{family: latest.get(name) for name, family in GLOBAL_METRICS.items()},
    }
    return (MetricSample(family, value) for family, value in values.items() if value is not None)


def _finding_samples(findings: Sequence[Finding]) -> Iterator[MetricSample]:
    """Count the findings of every level, also of levels without any: an alert needs the 0."""
    counts = Counter(finding.level for finding in findings)
    return (MetricSample(FINDINGS, counts[level], (level,)) for level in get_args(Level))


def _validation_samples(run: RunView) -> Iterator[MetricSample]:
    for name, value in run.latest_validation().items():
        yield MetricSample(VALIDATION_BPB, value, (name,))
    for curve in run.eval_curves():
        yield MetricSample(EVALUATION, curve.values[-1], (curve.kind, curve.suite, curve.name, curve.metric))


def _recorded_samples(rank: int, latest: dict[str, float]) -> Iterator[MetricSample]:
    """The metrics of a rank that are not in ``_status_samples``."""
    for name, value in latest.items():
        prefix, slash, rest = name.partition("/")
        if name in RANK_METRICS:
            yield MetricSample(RANK_METRICS[name], value, (str(rank),))
        elif rank == 0 and prefix + slash in PREFIXES:
            yield MetricSample(PREFIXES[prefix + slash], value, (rest,))
        elif rank != 0 or name not in (*GLOBAL_METRICS, "tokens"):
            yield MetricSample(OTHER_METRIC, value, (name, str(rank)))


def _label_value(text: str) -> str:
    """A name without control characters, as it is shown everywhere.

    Half a surrogate pair, which UTF-8 cannot represent, is spelled out.
    """
    return sanitize(text).encode("utf-8", "backslashreplace").decode()


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
