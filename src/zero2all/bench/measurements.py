"""Measurements with a name and a unit, as a table, and their comparison with an earlier report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from zero2all import __version__
from zero2all.base.charts.table import markdown_table
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import write_json, write_text
from zero2all.base.machine.devices import synchronize
from zero2all.base.records import decode_json, parse_record, to_json

Unit = Literal["tokens/s", "MB/s", "GB/s", "ms"]
LOWER_IS_BETTER: tuple[Unit, ...] = ("ms",)
SLOWER = 0.9  # times as fast as before: less is a regression


@dataclass(frozen=True)
class Measurement:
    name: str
    value: float
    unit: Unit
    note: str = ""


@dataclass(frozen=True)
class Machine:
    cores: int
    load: float
    """Load average of the last minute when the benchmark ended."""
    devices: list[str]
    """Names of its GPUs."""
    torch: str
    zero2all: str


@dataclass(frozen=True)
class MeasurementReport:
    """The JSON file of ``z2a bench loader | comm | checkpoint``."""

    benchmark: str
    title: str
    """What was measured, in one line."""
    machine: Machine
    measurements: list[Measurement]


def this_machine() -> Machine:
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Machine(os.cpu_count() or 1, round(os.getloadavg()[0], 2), gpus, torch.__version__, __version__)


def wall_seconds(run: Callable[[], object], device: torch.device) -> float:
    """With the kernels that it starts on a GPU."""
    synchronize(device)
    begin = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - begin


def read_report(path: Path, benchmark: str) -> MeasurementReport:
    """An earlier report of the same benchmark."""
    try:
        found = decode_json(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: give the .json file of an earlier 'z2a bench {benchmark}'") from None
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} is not a report of 'z2a bench {benchmark}': {error}") from None
    try:
        report = parse_record(MeasurementReport, found, str(path))
    except Z2aError as error:
        raise UsageError(f"{path} is not a report of 'z2a bench {benchmark}': {error}") from None
    if report.benchmark != benchmark:
        raise UsageError(f"{path} is a report of 'z2a bench {report.benchmark}', not of 'z2a bench {benchmark}'")
    return report


def speedups(report: MeasurementReport, earlier: MeasurementReport) -> dict[str, float]:
    """How many times as fast each measurement is as in the earlier report; what only one has is left out."""
    before = {row.name: row for row in earlier.measurements}
    found = {}
    for row in report.measurements:
        old = before.get(row.name)
        if old is not None and old.unit == row.unit and old.value > 0 and row.value > 0:
            found[row.name] = old.value / row.value if row.unit in LOWER_IS_BETTER else row.value / old.value
    return found


def regressions(report: MeasurementReport, earlier: MeasurementReport) -> list[str]:
    """A line for each measurement that is slower by more than 10%."""
    rows = {row.name: row for row in report.measurements}
    before = {row.name: row for row in earlier.measurements}
    return [
        f"{name}: {rows[name].value:,.4g} {rows[name].unit}, was {before[name].value:,.4g} ({ratio:.2f}x)"
        for name, ratio in speedups(report, earlier).items()
        if ratio < SLOWER
    ]


def report_markdown(report: MeasurementReport, earlier: MeasurementReport | None = None) -> str:
    """A table; with an earlier report also its values and the speedup since."""
    machine = report.machine
    devices = f", {len(machine.devices)} x {machine.devices[0]}" if machine.devices else ""
    lines = [f"{report.title}; {machine.cores} cores{devices}, load {machine.load:.1f}, torch {machine.torch}.", ""]
    before = {} if earlier is None else {row.name: row for row in earlier.measurements}
    ratios = {} if earlier is None else speedups(report, earlier)
    head = ["", "", *(["before", "speedup"] if earlier else []), ""]
    rows = []
    for row in report.measurements:
        cells = [row.name, f"{row.value:,.4g} {row.unit}"]
        if earlier is not None:
            old = before.get(row.name)
            cells += [f"{old.value:,.4g}" if old else "", f"{ratios[row.name]:.2f}x" if row.name in ratios else ""]
        rows.append([*cells, row.note])
    return "\n".join([*lines, markdown_table(head, rows, "l" + "r" * (len(head) - 2))]) + "\n"


def write_report(out: Path, name: str, report: object, markdown: str) -> None:
    """``<out>/<name>.md`` for people, ``<out>/<name>.json`` of a record for programs."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / f"{name}.md", markdown)
    write_json(out / f"{name}.json", to_json(report))
