from __future__ import annotations

from pathlib import Path

import pytest

from zero2all.track import Record, read_steps


def test_a_torn_last_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with Record(path) as record:
        record.step(0, loss=1.0)
    path.write_bytes(path.read_bytes() + b'{"step": 1, "lo')
    assert list(read_steps(path)) == [0]
    record = Record(path)
    record.step(1, loss=2.0)
    assert {step: values["loss"] for step, values in read_steps(path).items()} == {0: 1.0, 1: 2.0}


def test_steps_done_again_after_a_resume_count_once(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.jsonl")
    for step in range(6):
        record.step(step, loss=float(step))
    record.event("resume", step=4)
    record.step(4, loss=40.0)
    steps = read_steps(tmp_path / "record.jsonl")
    assert {step: values["loss"] for step, values in steps.items()} == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0}


def test_it_is_readable_while_it_is_written(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.jsonl")
    record.step(0, loss=1.0)
    assert read_steps(tmp_path / "record.jsonl")[0]["loss"] == 1.0


def test_a_record_that_cannot_be_written_never_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    record = Record(tmp_path / "file" / "record.jsonl")
    record.step(0, loss=1.0)
    full = Record(Path("/dev/full"))
    full.step(0, loss=1.0)
    full.step(1, loss=1.0)
    assert capsys.readouterr().err.count("cannot be written") == 2
