"""Files of a run are input like any other: what is invalid is counted, shown for that run, and stops nothing."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from tests.track.runs import opened, record_steps, recording, spy_reads
from zero2all.cli.main import app as z2a
from zero2all.track import read_steps
from zero2all.track.health_checks import check_health
from zero2all.track.html_report import report_html
from zero2all.track.live_run import LiveRun
from zero2all.track.page_data import build_series, encode_json, summarize_run
from zero2all.track.record_index import index_path
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunView
from zero2all.track.server import build_app

DIGITS = "9" * 400


def lines(name: str, line: str, *values: str) -> dict[str, str]:
    """One line for each value."""
    return {f"{name} is {value:.9}": line % value for value in values}


BAD_LINES: dict[str, str] = {
    "not JSON": "hello",
    "torn": '{"step":3,"lo',
    "bytes": "\udcff\udcfe{",
    "a list": "[1,2]",
    "a number": "5",
    "null": "null",
    "empty object": "{}",
    "nothing known": '{"x":1}',
    "nested 100k": "[" * 100_000 + "]" * 100_000,
    "nested 100k inside": '{"step":3,"loss":' + "[" * 100_000 + "]" * 100_000 + "}",
    "event nested 900": '{"event":"x","step":3,"y":' + "[" * 900 + "]" * 900 + "}",
    "5000 digits": '{"step":3,"loss":' + "9" * 5000 + "}",
    "loss of 400 digits": '{"step":3,"loss":' + DIGITS + "}",
    **lines(
        "step", '{"step":%s,"loss":1}', '"abc"', "null", "[3]", "{}", "true", "3.5", "NaN", "Infinity", "-3", DIGITS
    ),
    **lines("time", '{"step":3,"time":%s,"loss":1}', '"noon"', "null", "NaN", "Infinity", DIGITS),
    "start without step": '{"event":"start"}',
    "resume with text": '{"event":"resume","step":"x"}',
    "resume with null": '{"event":"resume","step":null}',
    "event is a list": '{"event":["start"],"step":3}',
    "event is null": '{"event":null,"step":3}',
    "event with step as text": '{"event":"checkpoint","step":"x"}',
    "event with time as text": '{"event":"start","step":3,"time":"x"}',
    "startup is text": '{"event":"start","step":3,"time":1,"startup":"x"}',
    "evaluation without step": '{"event":"evaluation","bits_per_byte":1.0}',
    "evaluation of text": '{"event":"evaluation","step":3,"bits_per_byte":"x"}',
    "evaluation of 400 digits": '{"event":"evaluation","step":3,"bits_per_byte":' + DIGITS + "}",
    "evaluation, sources a list": '{"event":"evaluation","step":3,"bits_per_byte":1,"sources":[1]}',
    "evaluation, a source a number": '{"event":"evaluation","step":3,"bits_per_byte":1,"sources":{"a":1}}',
    "evaluation, a source without": '{"event":"evaluation","step":3,"bits_per_byte":1,"sources":{"a":{}}}',
    "goodput is text": '{"event":"goodput","goodput":"x"}',
    "documents are text": '{"event":"spike","step":3,"documents":"abc"}',
    "documents hold numbers": '{"event":"spike","step":3,"documents":[1]}',
    "sample is a list": '{"sample":["a"],"step":3}',
    "sample is an object": '{"sample":{},"step":3,"text":"x"}',
    "sample without step": '{"sample":"a","text":"x"}',
    "sample without text": '{"sample":"a","step":3}',
    "sample with step as list": '{"sample":"a","step":[1],"text":"x"}',
    "histogram without counts": '{"histogram":"a","step":3}',
    "histogram of text": '{"histogram":"a","step":3,"counts":["a"],"edges":[0,1]}',
    "histogram, edges missing": '{"histogram":"a","step":3,"counts":[1,2],"edges":[0,1]}',
}
UNUSUAL_LINES: dict[str, str] = {  # unusual, but a run can write them
    "loss is NaN": '{"step":9,"time":5,"loss":NaN}',
    "loss is Infinity": '{"step":9,"loss":-Infinity}',
    "loss is huge": '{"step":9,"loss":1e308,"other":1e308}',
    "loss is text": '{"step":9,"loss":"abc","tokens_per_second":[1]}',
    "loss is true": '{"step":9,"loss":true}',
    "no values": '{"step":9}',
    "time is 0": '{"step":9,"time":0,"loss":1}',
    "goodput is null": '{"event":"goodput","step":9,"goodput":null,"steps":0}',
    "done without anything": '{"event":"done"}',
    "not finite without step": '{"event":"not finite"}',
    "names with quotes": '{"step":9,"a\\"<b>\\u001b[31m":1}',
}


def steps(first: int, after: int) -> bytes:
    return b"".join(b'{"step":%d,"time":%d,"loss":%d}\n' % (step, step, step) for step in range(first, after))


def make(directory: Path, middle: bytes = b"", last: int = 13) -> Path:
    directory.mkdir(parents=True)
    start = b'{"event":"start","step":0,"steps":20,"time":0}\n'
    (directory / "record.jsonl").write_bytes(start + steps(0, 10) + middle + steps(10, last))
    return directory


def show_everything(run: RunView) -> None:
    """All that a page, a terminal and a report ask of a run."""
    encode_json(summarize_run(run, check_health(run)))
    encode_json(build_series(run, run.names, float("-inf"), float("inf"), 100))
    report_html([run])


def as_bytes(line: str) -> bytes:
    return line.encode("utf-8", "surrogateescape") + b"\n"


@pytest.mark.parametrize("what", BAD_LINES)
def test_a_bad_line_is_counted_and_the_lines_after_it_are_read(tmp_path: Path, what: str) -> None:
    run = opened(make(tmp_path / "a", as_bytes(BAD_LINES[what])))
    assert run.last_step == 12
    assert run.table(["loss"]).mean["loss"].tolist() == list(range(13))
    assert run.read_error is None
    [damage] = run.damage
    assert "record.jsonl: 1 line skipped" in damage
    assert str(len(b'{"event":"start","step":0,"steps":20,"time":0}\n' + steps(0, 10))) in damage
    assert [finding.level for finding in check_health(run) if finding.what == "damaged files"] == ["note"]
    show_everything(run)
    assert list(read_steps(tmp_path / "a" / "record.jsonl")) == list(range(13))


@pytest.mark.parametrize("what", UNUSUAL_LINES)
def test_an_unusual_line_is_not_damage(tmp_path: Path, what: str) -> None:
    run = opened(make(tmp_path / "a", as_bytes(UNUSUAL_LINES[what])))
    assert (run.last_step, run.damage, run.read_error) == (12, [], None)
    show_everything(run)


@pytest.mark.parametrize("kind", ["bad", "unusual"])
def test_a_resumed_run_appends_after_such_lines(tmp_path: Path, kind: str) -> None:
    """They must not stop the writing end either, which reads what lies beyond the index when it opens a record."""
    lines = BAD_LINES if kind == "bad" else UNUSUAL_LINES
    directory = make(tmp_path / "a", b"".join(map(as_bytes, lines.values())))
    with recording(directory) as record:
        for step in range(13, 200):
            record.step(step, loss=float(step), norm=1e308)
        assert record.flush(30)
    assert index_path(directory / "record.jsonl").stat().st_size
    run = opened(directory)
    assert run.readers[0].chunks
    assert [step for step in run.table(["loss"]).steps if step != 9] == [step for step in range(200) if step != 9]
    show_everything(run)


def test_every_bad_line_at_once_on_a_page_of_two_runs(tmp_path: Path) -> None:
    """Appended while the page is open: run a continues and reports it, run b is not affected."""
    a, b = make(tmp_path / "a", last=10), make(tmp_path / "b", last=10)
    runs = [RunView(LocalRunLocation(directory)) for directory in (a, b)]
    with TestClient(build_app(runs, "k")) as client:
        client.params = {"key": "k"}
        for directory, bad in ((a, BAD_LINES), (b, {})):
            with open(directory / "record.jsonl", "ab") as stream:
                stream.write(b"".join(map(as_bytes, bad.values())) + steps(10, 14))
        until, answer = time.monotonic() + 60, client.get("/api/runs").json()
        while [run["status"]["step"] for run in answer] != [13, 13]:
            assert time.monotonic() < until, "a run is no longer followed"
            time.sleep(0.05)
            answer = client.get("/api/runs").json()
    assert [len(run["status"]["damage"]) for run in answer] == [1, 0]
    assert f"{len(BAD_LINES)} lines skipped" in answer[0]["status"]["damage"][0]


def test_a_bug_of_ours_is_reported_for_its_run_and_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.track.live_run.UNCHANGED_CHECK_SECONDS", -1.0)
    monkeypatch.setattr("zero2all.track.live_run.CHECK_SHARE", math.inf)
    live_run = LiveRun(RunView(LocalRunLocation(make(tmp_path / "a"))))
    for name in ("zero2all.track.record_reader.RecordReader.refresh", "zero2all.track.live_run.check_health"):
        with monkeypatch.context() as broken:

            def fail(*_: object) -> None:
                raise ZeroDivisionError("on purpose")

            broken.setattr(name, fail)
            broken.setattr("zero2all.track.live_run.HEALTH_CHECK_SECONDS", -1.0)
            live_run.refresh()
            assert "ZeroDivisionError: on purpose" in live_run.summary.status.trouble
        monkeypatch.setattr("zero2all.track.live_run.HEALTH_CHECK_SECONDS", -1.0)
        live_run.refresh()
        assert live_run.summary.status.trouble is None
    with monkeypatch.context() as broken:
        broken.setattr("zero2all.track.live_run.check_health", fail)
        first = LiveRun(RunView(LocalRunLocation(make(tmp_path / "c"))))  # also at the first refresh
        assert "on purpose" in first.summary.status.trouble


def test_a_line_over_the_limit_is_skipped_once_and_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero2all.track.record_lines.MAX_LINE_BYTES", 4096)
    long = b'{"sample":"a","step":3,"text":"' + b"x" * 20_000 + b'"}\n'
    directory = make(tmp_path / "a", long)
    run = opened(directory)
    assert run.last_step == 12
    assert "1 line skipped" in run.damage[0]
    assert "4096" in run.damage[0]
    assert list(read_steps(directory / "record.jsonl")) == list(range(13))
    with open(directory / "record.jsonl", "ab") as stream:  # one that is being written, and has no end yet
        stream.write(b"y" * 30_000)
        stream.flush()
        run.refresh()
        asked = spy_reads(run.location, monkeypatch)
        run.refresh()
        assert sum(length for _, length in asked) < 4096, "what is known to be too long was read again"
        stream.write(b"y\n" + steps(13, 15))
    run.refresh()
    assert run.last_step == 14
    assert "2 lines skipped" in run.damage[0]
    record_steps(directory, [15])
    run.refresh()
    assert run.last_step == 15


def test_a_line_over_the_limit_of_our_own_does_not_spoil_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero2all.track.record_lines.MAX_LINE_BYTES", 4096)
    with recording(tmp_path) as record:
        for step in range(200):
            record.step(step, loss=1.0)
            if step == 100:
                record.sample(step, "zh", "x" * 5000)
    run = opened(tmp_path)
    assert len(run.readers[0].chunks) == 3
    assert run.damage == []
    assert run.table(["loss"]).steps.tolist() == list(range(200))


GOOD_ENTRY = {"at": [0, 47], "lines": 1, "steps": [0, 0], "times": [0, 0], "names": ["loss"],
              "min": [0], "mean": [0], "max": [0]}  # fmt: skip
BAD_ENTRIES = {
    "unknown keys": '{"x":1}',
    "a list": "[]",
    "nested": "[" * 100_000,
    **{
        f"{key} is {value!r:.20}": json.dumps({**GOOD_ENTRY, key: value})
        for key, value in [
            ("at", 5), ("at", [0]), ("at", ["0", "47"]), ("at", [0, int(DIGITS)]), ("at", [0, -1]), ("at", [0, 0]),
            ("at", None), ("at", [0.0, 47.0]), ("lines", "x"), ("lines", None), ("lines", -1), ("steps", 5),
            ("steps", ["a", "b"]), ("steps", [0]), ("steps", [int(DIGITS), 1]), ("times", ["x", 1]), ("times", []),
            ("names", 5), ("names", ["a", "b"]), ("names", [["a"]]), ("min", [None]), ("min", ["x"]), ("mean", []),
            ("max", [int(DIGITS)]), ("max", {}), ("others", 5), ("others", [5]), ("others", [{"x": 1}]),
            ("others", [{"event": "start"}]), ("others", [{"sample": "a", "step": 1}]),
            ("others", [{"sample": "a", "step": 1, "at": [0, 10**15]}]), ("others", [{"sample": ["a"], "step": 1}]),
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_ENTRIES)
def test_a_damaged_index_is_not_used(tmp_path: Path, what: str) -> None:
    directory = make(tmp_path / "a")
    index_path(directory / "record.jsonl").write_text(BAD_ENTRIES[what] + "\n")
    run = opened(directory)
    assert run.table(["loss"]).mean["loss"].tolist() == list(range(13))
    assert [event.event for event in run.events] == ["start"]
    assert "record.index.jsonl" in run.damage[0]
    show_everything(run)
    record_steps(directory, range(13, 100))  # and rebuilt by the next writer
    assert opened(directory).table(["loss"]).mean["loss"].tolist() == list(range(100))


BAD_METADATA = [
    ("recipe.yaml", "corpus: hello"),
    ("recipe.yaml", "corpus: {sources: hello}"),
    ("recipe.yaml", "corpus: {sources: [1, [2]]}"),
    ("recipe.yaml", "train: 5\nname: [x]"),
    ("recipe.yaml", "train: {batch_tokens: many}"),
    ("recipe.yaml", "train: {batch_tokens: -5}"),
    ("recipe.yaml", f"train: {{batch_tokens: {DIGITS}}}"),
    ("recipe.yaml", "[" * 5000),
    ("recipe.yaml", "a: &a [*a]"),
    ("recipe.yaml", "- x"),
    ("recipe.yaml", "\x00"),
    ("identity.json", '{"model":"x"}'),
    ("identity.json", '{"model":{"vocab_size":"x"}}'),
    ("identity.json", '{"model":{"vocab_size":-1}}'),
    ("identity.json", '{"model":{"vocab_size":' + DIGITS + "}}"),
    ("identity.json", "[1]"),
    ("identity.json", "[" * 100_000),
    ("environment.json", "{"),
    ("environment.json", '{"a":' + "[" * 900 + "]" * 900 + "}"),
    ("environment.json", '"x"'),
]


@pytest.mark.parametrize(("file", "text"), BAD_METADATA)
def test_a_damaged_file_beside_the_record_is_named(tmp_path: Path, file: str, text: str) -> None:
    directory = make(tmp_path / "a")
    (directory / file).write_text(text)
    run = opened(directory)
    assert run.last_step == 12
    assert file in run.damage[0]
    show_everything(run)
    client = TestClient(build_app([run], "k"))
    assert client.get("/api/runs/0/facts?key=k").status_code == 200


@pytest.mark.parametrize("file", ["recipe.yaml", "identity.json", "environment.json"])
def test_a_file_of_3_gb_is_not_read(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make(tmp_path / "a")
    with open(directory / file, "wb") as stream:
        os.truncate(stream.fileno(), 3 * 10**9)
    run = RunView(LocalRunLocation(directory))
    asked = spy_reads(run.location, monkeypatch)
    run.refresh()
    assert run.last_step == 12
    assert "3.00GB" in run.damage[0]
    assert max(length for _, length in asked) < 2**20


def test_once_and_report_show_the_other_runs_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a", as_bytes(BAD_LINES['step is "abc"']))
    make(tmp_path / "b")
    done = CliRunner().invoke(z2a, ["watch", "--once", str(tmp_path)])
    assert done.exit_code == 0
    assert "1 line skipped" in done.output
    assert "b: step 13/20  loss 12.0000" in done.output
    checked = []

    def fail_for_a(run: RunView) -> list[object]:
        checked.append(run.name)
        if run.name == "a":
            raise ZeroDivisionError("on purpose")
        return []

    monkeypatch.setattr("zero2all.track.terminal.check_health", fail_for_a)
    monkeypatch.setattr("zero2all.track.health_checks.check_health", fail_for_a)
    for form in ([], ["--json"]):
        done = CliRunner().invoke(z2a, ["watch", "--once", *form, str(tmp_path)])
        assert done.exit_code == 0, done.output
        assert "ZeroDivisionError: on purpose" in done.output
        assert "b" in checked


def test_every_command_of_a_process_prints_its_object(tmp_path: Path) -> None:
    make(tmp_path / "a")
    for _ in range(2):
        output = CliRunner().invoke(z2a, ["watch", "--once", "--json", str(tmp_path)]).stdout
        assert [run["step"] for run in json.loads(output)["runs"]] == [12]
