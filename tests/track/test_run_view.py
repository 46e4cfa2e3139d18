"""A run view equals the record, whether read from the index or not, and whatever steps were recomputed."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests.track.runs import opened, record_steps, recording
from zero2all.base.errors import UsageError
from zero2all.track import read_steps, record_reader
from zero2all.track.record_index import index_path
from zero2all.track.record_lines import LoggedLine, SampleLine
from zero2all.track.run_locations import LocalRunLocation, find_runs
from zero2all.track.run_view import RunView


def write(path: Path, rng: random.Random, resumes: list[tuple[int, int]], until: int) -> None:
    """Steps with resumes: at (a, b) it fell back from a to b."""
    first = 0
    for stop, back in [*resumes, (until, until)]:
        with recording(path.parent) as record:
            record.event("resume" if first else "start", step=first, steps=until)
            for step in range(first, stop):
                values = {"loss": rng.random(), "tokens": (step + 1) * 100.0}
                if step % 50 == 0:
                    values["valid/loss"] = rng.random()
                    record.sample(step, "zh", f"text of {step}")
                record.step(step, **values)
        first = back


def same_as_record(run: RunView, path: Path) -> None:
    expected = read_steps(path)
    table = run.table(["loss", "valid/loss"])
    assert table.steps.tolist() == list(expected)
    assert table.mean["loss"].tolist() == [values["loss"] for values in expected.values()]
    sparse = [values.get("valid/loss", np.nan) for values in expected.values()]
    np.testing.assert_array_equal(table.mean["valid/loss"], sparse)


@pytest.mark.parametrize("with_index", [True, False])
def test_a_run_view_equals_the_record_with_and_without_its_index(tmp_path: Path, with_index: bool) -> None:
    path = tmp_path / "record.jsonl"
    write(path, random.Random(1), [(300, 130), (131, 128), (400, 0), (90, 64)], 1000)
    if not with_index:
        index_path(path).unlink()
    run = RunView(LocalRunLocation(tmp_path))
    assert run.refresh()
    same_as_record(run, path)
    assert run.last_step == 999
    assert run.total_steps == 1000
    assert [event.event for event in run.events] == ["start", "resume", "resume", "start", "resume"]
    assert run.logged_steps() == {"zh": list(range(0, 1000, 50))}
    line = run.logged_line(LoggedLine("sample", "zh", 250))
    assert isinstance(line, SampleLine)
    assert line.text == "text of 250"
    assert not run.refresh()


def test_following_step_by_step_gives_the_same_as_opening_at_the_end(tmp_path: Path) -> None:
    rng = random.Random(2)
    path = tmp_path / "record.jsonl"
    write(tmp_path / "complete" / "record.jsonl", rng, [(200, 100), (150, 20)], 300)
    data = (tmp_path / "complete" / "record.jsonl").read_bytes()
    run, done = RunView(LocalRunLocation(tmp_path)), 0
    while done < len(data):
        done = min(len(data), done + rng.randrange(1, 4000))
        path.write_bytes(data[:done])  # truncated anywhere, also within a line
        run.refresh()
    same_as_record(run, path)


def test_a_long_range_is_drawn_from_chunks_and_no_spike_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recording(tmp_path) as record:
        for step in range(5000):
            record.step(step, loss=9.0 if step == 3210 else 1.0)
    monkeypatch.setattr(record_reader, "MAX_RAW_BYTES", 50_000)
    run = opened(tmp_path)
    table = run.table(["loss"], points=50)
    assert table.high is not None
    assert table.low is not None
    assert len(table.steps) <= 50
    assert max(table.high["loss"]) == 9.0
    assert min(table.low["loss"]) == 1.0
    assert table.steps[0] < 100 < 4900 < table.steps[-1]
    zoomed = run.table(["loss"], first=3200, last=3220, points=50)
    assert zoomed.steps.tolist() == list(range(3200, 3221))
    assert zoomed.mean["loss"][10] == 9.0


def test_ranks_are_merged_under_their_numbers(tmp_path: Path) -> None:
    for rank in (0, 3):
        with recording(tmp_path, rank=rank) as record:
            record.step(0, loss=float(rank))
    run = opened(tmp_path)
    assert run.names == ["loss", "loss@3"]
    assert run.table(["loss"], rank=3).mean["loss"].tolist() == [3.0]


def test_a_record_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    write(path, random.Random(3), [], 200)
    run = opened(tmp_path)
    path.unlink()
    write(path, random.Random(4), [], 50)
    run.refresh()
    same_as_record(run, path)


def names(*targets: Path) -> list[str]:
    return [location.name for location in find_runs([str(target) for target in targets])]


def test_all_runs_of_a_workspace_are_found_and_told_apart(tmp_path: Path) -> None:
    first, second = tmp_path / "runs" / "first", tmp_path / "runs" / "second"
    for run in (first / "run", first / "deeper", first / "experiments" / "lr" / "a-seed1", second / "deeper"):
        record_steps(run)
        (run / "checkpoints").mkdir()
        (run / "checkpoints" / "record.jsonl").touch()
    (first / "loop").symlink_to(first)
    (first / "documents.work" / "parts").mkdir(parents=True)
    (first / "documents.work" / "parts" / "record.jsonl").touch()
    assert names(first) == ["deeper", "experiments/lr/a-seed1", "first"]
    assert names(first / "deeper") == names(second) == ["deeper"]
    assert names(tmp_path / "runs") == ["first/deeper", "first/experiments/lr/a-seed1", "first", "second/deeper"]
    assert names(first / "deeper", second) == ["first/deeper", "second/deeper"]
    assert names(first / "deeper", first / "deeper") == ["deeper"]
    (tmp_path / "link").symlink_to(first / "run")
    assert names(tmp_path / "link") == ["link"]
    with pytest.raises(UsageError, match="no run in"):
        names(tmp_path / "nothing")


def test_only_the_files_of_a_run_are_read_and_no_link_leads_out(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("private")
    run = tmp_path / "run"
    run.mkdir()
    (run / "record.jsonl").symlink_to(secret)
    (run / "recipe.yaml").symlink_to("/etc/hostname")
    (run / "notes.txt").write_text("x")
    location = LocalRunLocation(run)
    assert location.file_sizes() == {}
    for name in ("record.jsonl", "recipe.yaml", "../secret.txt", "notes.txt", "/etc/hostname", "%2e%2e/secret.txt"):
        with pytest.raises(UsageError, match="not a file of the run"):
            location.read(name, 0, 10)


def test_evaluations_are_series_of_their_own(tmp_path: Path) -> None:
    with recording(tmp_path) as record:
        for step in range(6):
            record.step(step, loss=1.0)
            if step % 3 == 2:
                record.event("evaluation", step=step, bits_per_byte=2.0 - step, sources={"zh": {"bits_per_byte": 3.0}})
    run = opened(tmp_path)
    assert run.names == ["loss", "validation/all", "validation/zh"]
    assert run.validation_table().steps.tolist() == [2, 5]
    assert run.validation_table().mean["validation/all"].tolist() == [0.0, -3.0]
    assert run.validation_table(first=3).mean["validation/zh"].tolist() == [3.0]


def test_a_source_named_all_does_not_hide_the_total(tmp_path: Path) -> None:
    with recording(tmp_path) as record:
        record.event("evaluation", step=0, bits_per_byte=2.0, sources={"all": {"bits_per_byte": 3.0}})
    table = opened(tmp_path).validation_table()
    assert {name: column.tolist() for name, column in table.mean.items()} == {
        "validation/all": [2.0],
        "validation/all (source)": [3.0],
    }


@pytest.mark.parametrize("with_index", [True, False])
def test_the_newest_value_of_each_metric(tmp_path: Path, with_index: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one that is recorded rarely, and not of steps that a restart discarded."""
    with recording(tmp_path) as record:
        record.event("start", step=0, steps=1000)
        for step in range(500):
            record.step(step, loss=float(step), **({"rare": float(step)} if step % 7 == 0 and step < 100 else {}))
        record.event("resume", step=450, steps=1000)
        record.step(450, loss=np.nan)
    if not with_index:
        (tmp_path / "record.index.jsonl").unlink()
    run = opened(tmp_path)
    values = run.readers[0].latest_values()
    assert np.isnan(values["loss"])
    assert values["rare"] == 98.0
    with recording(tmp_path) as record:
        for step in range(451, 600):
            record.step(step, loss=np.nan)
        record.event("resume", step=50, steps=1000)
    run.refresh()
    assert run.readers[0].latest_values() == {"loss": 49.0, "rare": 49.0}
    monkeypatch.setattr(record_reader, "MAX_RAW_BYTES", 0)
    latest = opened(tmp_path).readers[0].latest_values()
    assert latest == pytest.approx({"loss": 24.5, "rare": 24.5}), "means of a chunk"


def test_a_value_that_is_nan_for_a_whole_chunk_is_not_the_one_before(tmp_path: Path) -> None:
    with recording(tmp_path) as record:
        for step in range(256):
            record.step(step, loss=1.0 if step < 64 else np.nan)
    assert np.isnan(opened(tmp_path).readers[0].latest_values()["loss"])
