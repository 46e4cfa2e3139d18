"""The guarantee of the record: every acknowledged line is in it, and failures stay on its own thread."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from zero2all.track import RunRecord, read_steps
from zero2all.track.record_index import CHUNK_LINES, index_path
from zero2all.track.record_lines import EventLine, HistogramLine, RecordLine, SampleLine, StepLine
from zero2all.track.run_record import MAX_WRITES_PER_SECOND, AppendFile, RunRecordWriter, read_record_lines
from zero2all.track.sinks import POLL_SECONDS, AsyncWriter


def losses(path: Path) -> dict[int, float]:
    return {step: values["loss"] for step, values in read_steps(path).items()}


def test_a_truncated_last_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with RunRecord(path) as record:
        record.step(0, loss=1.0)
    path.write_bytes(path.read_bytes() + b'{"step": 1, "lo')
    assert list(read_steps(path)) == [0]
    with RunRecord(path) as record:
        record.step(1, loss=2.0)
    assert losses(path) == {0: 1.0, 1: 2.0}


def test_steps_recomputed_after_a_resume_count_once(tmp_path: Path) -> None:
    with RunRecord(tmp_path / "record.jsonl") as record:
        for step in range(6):
            record.step(step, loss=float(step))
        record.event("resume", step=4)
        record.step(4, loss=40.0)
    assert losses(tmp_path / "record.jsonl") == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0}


def test_every_kind_of_line_and_the_machine_are_recorded(tmp_path: Path) -> None:
    with RunRecord(tmp_path / "record.jsonl", system_every=0.02) as record:
        record.step(3, **{"loss": 1.5, "loss/zh": 2.5})
        record.sample(3, "zh", "<b>春</b>")
        record.histogram(3, "grad", [1, 2], [0.0, 0.5, 1.0])
        record.event("spike", step=3, documents=[{"gid": "a"}])
        while not (record.flush() and any("system/cpu_cores" in one for one in read_steps(record.path).values())):
            time.sleep(0.01)
    step = read_steps(record.path)[3]
    assert (step["loss"], step["loss/zh"]) == (1.5, 2.5)
    assert step["system/memory_gib"] > 0
    lines = list(read_record_lines(record.path))
    assert next(line.text for line in lines if isinstance(line, SampleLine)) == "<b>春</b>"
    assert next(line.counts for line in lines if isinstance(line, HistogramLine)) == [1, 2]
    assert next(line.details["documents"] for line in lines if isinstance(line, EventLine)) == [{"gid": "a"}]


def test_lines_on_disk_have_their_keys_in_a_fixed_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.5)
    with RunRecord(tmp_path / "record.jsonl", system_every=None) as record:
        record.event("start", step=0, steps=2)
        record.step(0, **{"loss": 1.5, "loss/zh": 2.5})
        record.sample(0, "zh", "春")
        record.histogram(0, "grad", [1], [0.0, 1.0])
        record.event("resume", step=0)  # begins a chunk of the index
    assert (tmp_path / "record.jsonl").read_text(encoding="utf-8").splitlines() == [
        '{"event":"start","time":1.5,"step":0,"steps":2}',
        '{"step":0,"time":1.5,"loss":1.5,"loss/zh":2.5}',
        '{"sample":"zh","step":0,"time":1.5,"text":"春"}',
        '{"histogram":"grad","step":0,"time":1.5,"counts":[1],"edges":[0.0,1.0]}',
        '{"event":"resume","time":1.5,"step":0}',
    ]
    assert index_path(tmp_path / "record.jsonl").read_text(encoding="utf-8").splitlines() == [
        '{"at":[0,216],"lines":1,"steps":[0,0],"times":[1.5,1.5],"names":["loss","loss/zh"],'
        '"min":[1.5,2.5],"mean":[1.5,2.5],"max":[1.5,2.5],"others":['
        '{"event":"start","time":1.5,"step":0,"steps":2,"at":[0,48]},'
        '{"sample":"zh","step":0,"at":[95,144]},{"histogram":"grad","step":0,"at":[144,216]}]}'
    ]


def test_a_thousand_ranks_share_the_writes_that_a_file_system_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wrote at every step, and waited for the disk at every event."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with RunRecord(tmp_path / "record.jsonl", rank=7, ranks=1024, system_every=None) as record:
        assert record._writers[0]._every == 1024 / MAX_WRITES_PER_SECOND
        record.event("checkpoint", step=1)
        record.step(1, step_time=1.0)
        assert record.flush(), "before a checkpoint is committed, they do write"
        assert list(read_steps(record.path)) == [1]
    assert synced == []
    with RunRecord(tmp_path / "record.jsonl", ranks=1024, system_every=None) as record:
        assert record._writers[0]._every == POLL_SECONDS
        record.event("checkpoint", step=1)
    assert len(synced) == 1


def test_a_record_that_cannot_be_written_never_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    with RunRecord(tmp_path / "file" / "record.jsonl") as record:
        for step in range(5):
            record.step(step, loss=1.0)
        assert not record.flush()
    stderr = capsys.readouterr().err
    assert stderr.count("fails") == 1
    assert "5 lines are lost" in stderr


def test_lines_wait_in_memory_while_the_disk_is_full_and_none_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "later" / "record.jsonl"
    (tmp_path / "later").write_text("in the way")
    with RunRecord(path) as record:
        for step in range(50):
            record.step(step, loss=float(step))
        assert not record.flush()
        (tmp_path / "later").unlink()
    assert list(losses(path)) == list(range(50))


def test_lines_that_come_while_the_disk_is_full_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, full = RunRecordWriter(tmp_path / "record.jsonl"), True
    write = AppendFile.write

    def on_a_full_disk(self: AppendFile) -> None:
        if full:
            raise OSError(errno.ENOSPC, "no space left")
        write(self)

    monkeypatch.setattr(AppendFile, "write", on_a_full_disk)
    lines: list[RecordLine] = [StepLine(step, None, {}) for step in range(12)]
    for known in (3, 7):  # a try again begins with the same lines and may have more of them
        with pytest.raises(OSError, match="no space"):
            file.write(lines[:known])
    full = False
    file.write(lines[:9])
    file.write(lines[9:])
    file.close()
    assert [line.step for line in read_record_lines(tmp_path / "record.jsonl")] == list(range(12))


def test_system_metrics_are_logged_at_the_step_that_a_resume_begins_with(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with RunRecord(path, system_every=0.5) as record:  # the first after half a second, long after the event
        record.event("resume", step=300)
        until = time.monotonic() + 30
        while time.monotonic() < until and not (path.exists() and read_steps(path)):
            time.sleep(0.02)
    assert list(read_steps(path)) == [300]


def test_a_full_writer_drops_lines_and_warns_once(capsys: pytest.CaptureFixture[str]) -> None:
    gate, got = threading.Event(), []

    def slow(items: list[int]) -> None:
        gate.wait(10)
        got.extend(items)

    writer = AsyncWriter("the slow one", slow, capacity=3)
    for number in range(10):
        writer.put(number)
    gate.set()
    writer.close()
    stderr = capsys.readouterr().err
    assert len(got) + writer.dropped == 10
    assert writer.dropped >= 6
    assert stderr.count("does not keep up") == 1
    assert f"{writer.dropped} lines are lost" in stderr


def test_the_index_covers_the_record_without_a_gap_whatever_was_killed(tmp_path: Path) -> None:
    """The same lines written at once, and in parts with the index truncated, removed or stale in between."""
    at_once, in_parts = tmp_path / "once" / "record.jsonl", tmp_path / "parts" / "record.jsonl"
    with RunRecord(at_once, system_every=None) as record:
        for step in range(5 * CHUNK_LINES):
            record.step(step, loss=float(step))
    bounds = [0, 70, 71, 200, 5 * CHUNK_LINES]
    for number, (first, after) in enumerate(itertools.pairwise(bounds)):
        with RunRecord(in_parts, system_every=None) as record:
            for step in range(first, after):
                record.step(step, loss=float(step))
        index = index_path(in_parts)
        if number == 0:
            index.write_bytes(index.read_bytes()[:-20])
        elif number == 1:
            index.unlink()
        elif number == 2:
            index.write_text('{"at":[0,99999999],"lines":0}\n')
    for path in (at_once, in_parts):
        entries = [json.loads(line) for line in index_path(path).read_text().splitlines()]
        assert [entry["at"][0] for entry in entries] == [0, *(entry["at"][1] for entry in entries[:-1])]
        assert entries[-1]["at"][1] == path.stat().st_size
        assert [entry["steps"] for entry in entries] == [
            [first, first + CHUNK_LINES - 1] for first in range(0, 5 * CHUNK_LINES, CHUNK_LINES)
        ]
        assert entries[2]["mean"] == [2.5 * CHUNK_LINES - 0.5]
        assert (entries[2]["min"], entries[2]["max"]) == ([2.0 * CHUNK_LINES], [3.0 * CHUNK_LINES - 1])


def write_steps(path: Path, first: int, acknowledged: int) -> None:
    """Resume where a checkpoint would stand, and write the number of each flushed step to a pipe."""
    with RunRecord(path, system_every=0.01) as record:
        record.event("resume" if first else "start", step=first)
        for step in range(first, 10**9):
            record.step(step, loss=float(step))
            if step % 7 == 0 and record.flush():
                os.write(acknowledged, b"%d\n" % step)


@pytest.mark.slow
def test_sigkill_at_20_random_moments_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    rng = random.Random(8)
    path = tmp_path / "record.jsonl"
    resume_at = 0
    for _ in range(20):
        reading, writing = os.pipe()
        writer = multiprocessing.get_context("fork").Process(target=write_steps, args=(path, resume_at, writing))
        writer.start()
        os.close(writing)
        with open(reading) as stream:
            acknowledged = [int(stream.readline()) for _ in range(rng.randrange(1, 40))]
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            acknowledged += [int(line) for line in stream if line.endswith("\n")]
        writer.join(30)
        kept = losses(path)
        assert list(kept) == list(range(len(kept))), "a step is missing"
        assert acknowledged[-1] in kept
        assert all(loss == step for step, loss in kept.items())
        resume_at = max(0, acknowledged[-1] - rng.randrange(30))
