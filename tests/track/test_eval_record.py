"""evals.jsonl: written by any number of processes, read while it grows and whatever is in it."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from tests.track.runs import opened, recording
from zero2all.track.eval_record import EvalLine, EvalReader, append_evals, eval_curves
from zero2all.track.html_report import report_html
from zero2all.track.page_data import build_series
from zero2all.track.run_locations import EVALS_FILE, LocalRunLocation
from zero2all.track.run_view import RunView


def line(step: int, value: float, **changes: Any) -> EvalLine:
    fields: dict[str, Any] = {
        "kind": "probes", "suite": "stories", "name": "sum", "metric": "probability", "better": "higher",
        "group": "en arithmetic", "digest": "a", "time": 1000.0 + step,
    }  # fmt: skip
    return EvalLine(step=step, value=value, **{**fields, **changes})


def read(directory: Path) -> EvalReader:
    reader = EvalReader(LocalRunLocation(directory))
    reader.refresh(reader.location.file_sizes())
    return reader


def test_what_is_written_is_read_as_curves_with_trends(tmp_path: Path) -> None:
    append_evals(tmp_path, [line(step, step / 100, name="rising") for step in range(10, 90, 10)])
    append_evals(tmp_path, [line(step, -step / 100, name="falling") for step in range(10, 90, 10)])
    append_evals(tmp_path, [line(step, -step, name="loss", better="lower") for step in range(80, 0, -10)])
    rising, falling, loss = read(tmp_path).curves()
    assert rising.steps == list(range(10, 90, 10))
    assert rising.values == [step / 100 for step in range(10, 90, 10)]
    assert (rising.tau, falling.tau, loss.tau) == (1.0, -1.0, 1.0)
    assert rising.p == pytest.approx(3 / 40320)
    assert falling.p == pytest.approx(1.0)
    assert loss.steps == rising.steps


def test_the_last_value_of_a_step_counts_and_no_other_definition() -> None:
    [curve] = eval_curves([line(1, 0.1), line(2, 0.2), line(1, 0.9)])
    assert (curve.steps, curve.values) == ([1, 2], [0.9, 0.2])
    [curve] = eval_curves([line(1, 0.1), line(2, 0.2), line(3, 0.3, digest="b")])
    assert curve.steps == [3]


def test_a_growing_file_is_followed_and_a_replaced_one_read_again(tmp_path: Path) -> None:
    append_evals(tmp_path, [line(1, 0.1)])
    reader = read(tmp_path)
    assert not reader.refresh(reader.location.file_sizes())
    append_evals(tmp_path, [line(2, 0.2)])
    assert reader.refresh(reader.location.file_sizes())
    assert reader.curves()[0].values == [0.1, 0.2]
    (tmp_path / EVALS_FILE).unlink()
    append_evals(tmp_path, [line(3, 0.3)])
    assert reader.refresh(reader.location.file_sizes())
    assert reader.curves()[0].values == [0.3]


def test_checkpoints_that_a_resumed_run_abandoned_are_left_out(tmp_path: Path) -> None:
    events = [{"event": "start", "step": 0, "time": 100.0}, {"event": "resume", "step": 20, "time": 200.0}]
    (tmp_path / "record.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    append_evals(tmp_path, [line(10, 0.1, time=50.0)])  # before the run was started again from scratch
    append_evals(tmp_path, [line(step, 0.1, time=150.0) for step in (15, 20, 30)])
    run = RunView(LocalRunLocation(tmp_path))
    run.read_to_end()
    assert run.eval_curves()[0].steps == [15, 20]
    append_evals(tmp_path, [line(30, 0.2, time=250.0)])
    run.refresh()
    assert run.eval_curves()[0].steps == [15, 20, 30]


INVALID: list[tuple[str, dict[str, Any] | str]] = [
    ("not JSON", "{nonsense"),
    ("not a JSON object", "[1]"),
    ("version: ", {"version": 2}),
    ("value: ", {"value": "high"}),
    ("value: ", {"value": float("nan")}),
    ("value: ", {"value": True}),
    ("step: ", {"step": -1}),
    ("step: ", {"step": 1.5}),
    ("time: ", {"time": 1e300}),
    ("name: Value error, is not a name", {"name": "a/b"}),
    ("name: ", {"name": ""}),
    ("suite: ", {"suite": "x" * 500}),
    ("group: ", {"group": "\x1b[31m"}),
    ("better: ", {"better": "sideways"}),
    ("nested too deeply", "[" * 100_000),
]


@pytest.mark.parametrize(("reason", "changes"), INVALID, ids=lambda value: str(value)[:40])
def test_an_invalid_line_is_skipped_and_reported(reason: str, changes: dict[str, Any] | str, tmp_path: Path) -> None:
    append_evals(tmp_path, [line(1, 0.1)])
    text = changes if isinstance(changes, str) else json.dumps({**vars(line(2, 0.5)), **changes})
    with open(tmp_path / EVALS_FILE, "a") as stream:
        stream.write(text + "\n")
    append_evals(tmp_path, [line(3, 0.3)])
    run = opened(tmp_path)
    assert run.eval_curves()[0].steps == [1, 3]
    assert any(reason in damage for damage in run.damage)


def test_a_line_that_a_crash_truncated_costs_only_itself(tmp_path: Path) -> None:
    append_evals(tmp_path, [line(1, 0.1), line(2, 0.2)])
    path = tmp_path / EVALS_FILE
    path.write_bytes(path.read_bytes()[:-20])
    append_evals(tmp_path, [line(3, 0.3)])
    assert read(tmp_path).curves()[0].steps == [1, 3]


def _append_many(directory: Path, name: str) -> None:
    for step in range(50):
        append_evals(directory, [line(step, 0.5, name=name, group="g" * 100) for _ in range(3)])


def test_several_processes_write_whole_lines(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(tmp_path, f"name-{number}")) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    reader = read(tmp_path)
    assert reader.skipped_lines == 0
    assert [len(curve.steps) for curve in reader.curves()] == [50, 50, 50]


def test_curves_are_series_of_the_page_and_of_the_report(tmp_path: Path) -> None:
    with recording(tmp_path) as record:
        record.event("start", step=0)
        record.step(0, loss=8.0)
    append_evals(tmp_path, [line(step, 0.1 * step, time=4e9) for step in (1, 2, 3)])
    append_evals(tmp_path, [line(2, 5.0, name="other", metric="bits per byte", time=4e9)])
    run = opened(tmp_path)
    name, other = "probes/stories: en arithmetic, probability/sum", "probes/stories: en arithmetic, bits per byte/other"
    assert {name, other} <= set(run.names)
    [block] = build_series(run, [name, other], 2, 3, 100)
    assert block.steps == [2, 3]
    assert block.mean == {name: [0.2, pytest.approx(0.3)], other: [5.0, None]}
    assert '"suite": "stories"' in report_html([run])
