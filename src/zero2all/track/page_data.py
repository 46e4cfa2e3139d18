"""What the page shows of a run, as JSON: its summary, and its metrics as columns."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.base.findings import Finding, PageFinding, page_finding
from zero2all.track.eval_record import EvalCurve
from zero2all.track.record_lines import EventLine, RecordLine, line_to_json
from zero2all.track.record_reader import Array, MetricTable
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunStatus, RunView

PAGE_DIR = Path(__file__).with_name("page")


@dataclass(frozen=True)
class RunSummary:
    """Everything that the page needs of a run except the series."""

    names: list[str]
    status: RunStatus
    events: list[EventLine]
    samples: dict[str, list[int]]
    """Steps by name."""
    histograms: dict[str, list[int]]
    verdicts: list[PageFinding]
    batch_tokens: int | None
    directory: str | None
    evals: list[EvalCurve]


@dataclass(frozen=True)
class SeriesBlock:
    """Columns of metrics over the same rows; ``low`` and ``high`` if downsampled."""

    steps: list[float | None]
    times: list[float | None]
    tokens: list[float] | None
    mean: dict[str, list[float | None]] | None
    low: dict[str, list[float | None]] | None
    high: dict[str, list[float | None]] | None


def summarize_run(run: RunView, findings: list[Finding]) -> RunSummary:
    return RunSummary(
        names=run.names,
        status=run.status(),
        events=run.events,
        samples=run.logged_steps(),
        histograms=run.logged_steps("histogram"),
        verdicts=[page_finding(finding) for finding in findings],
        batch_tokens=run.metadata.batch_tokens,
        directory=str(run.location.directory) if isinstance(run.location, LocalRunLocation) else None,
        evals=run.eval_curves(),
    )


def build_series(run: RunView, names: list[str], first: float, last: float, points: int) -> list[SeriesBlock]:
    """Build one block of columns per rank, and one for each kind of evaluation: their rows need not align."""
    blocks = []
    for rank, reader in sorted(run.readers.items()):
        suffix = f"@{rank}" if rank else ""
        available_names = [
            name.removesuffix(suffix) for name in names if ("@" in name) == bool(rank) and name.endswith(suffix)
        ]
        available_names = [name for name in available_names if name in reader.names]
        if available_names:
            axis_names = ["tokens"] if "tokens" in reader.names and "tokens" not in available_names else []
            blocks.append(
                _series_block(
                    run, run.table([*available_names, *axis_names], first, last, points, rank), available_names, suffix
                )
            )
    for table in (run.validation_table(first, last), _eval_table(run.eval_curves(), first, last)):
        if available_names := [name for name in names if name in table.mean]:
            blocks.append(_series_block(run, table, available_names, ""))
    return blocks


def _eval_table(curves: list[EvalCurve], first: float, last: float) -> MetricTable:
    """The evaluations of checkpoints, one row per step and one column per name."""
    times = {step: time for curve in curves for step, time in zip(curve.steps, curve.times, strict=True)}
    steps = sorted(step for step in times if first <= step <= last)
    by_name = {}
    for curve in curves:
        values = dict(zip(curve.steps, curve.values, strict=True))
        by_name[curve.metric_name] = np.array([values.get(step, math.nan) for step in steps])
    return MetricTable(
        np.array(steps, dtype=np.float64), np.array([times[step] for step in steps], dtype=np.float64), by_name
    )


def _series_block(run: RunView, table: MetricTable, names: list[str], suffix: str) -> SeriesBlock:
    return SeriesBlock(
        steps=_json_column(table.steps),
        times=_json_column(table.times),
        tokens=run.tokens_at(table),
        mean=_columns(table.mean, names, suffix),
        low=_columns(table.low, names, suffix),
        high=_columns(table.high, names, suffix),
    )


def _columns(columns: dict[str, Array] | None, names: list[str], suffix: str) -> dict[str, list[float | None]] | None:
    return None if columns is None else {name + suffix: _json_column(columns[name]) for name in names}


def _json_column(column: Array) -> list[float | None]:
    return [None if not math.isfinite(value) else value for value in column.tolist()]


def encode_json(value: Any) -> str:
    """JSON for browsers: NaN and infinities become null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_fields)
    except ValueError:
        return json.dumps(_replace_non_finite(value), ensure_ascii=False, allow_nan=False)


def _fields(value: Any) -> Any:
    """A dataclass as JSON, one level deep."""
    return line_to_json(value) if isinstance(value, RecordLine) else vars(value)


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value):
        value = _fields(value)
    if isinstance(value, dict):
        return {name: _replace_non_finite(inner) for name, inner in value.items()}
    return [_replace_non_finite(inner) for inner in value] if isinstance(value, list) else value
