"""The remote host may answer anything: it is rejected or truncated, in bounded time and memory, and never executed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zero2all.base.console import sanitize
from zero2all.cli.main import app
from zero2all.track import ssh as ssh_module
from zero2all.track.run_locations import SshRunLocation, find_runs
from zero2all.track.run_view import RunView
from zero2all.track.ssh import SshConnection, UnreachableError, parse_address

FAKE = """
import os, re, sys, time

mode = sys.argv[1]
out = os.fdopen(1, "wb", buffering=0)


def endless(data=b"x" * 65536):
    while True:
        out.write(data)


if mode == "flood before hello":
    endless()
if mode == "flood on stderr":
    for _ in range(200):
        os.write(2, b"y" * 65536)
    os.write(2, b"\\nlast words \\x1b[31m\\n")
    sys.exit(255)
for line in sys.stdin:
    mark = re.findall("z2a-[0-9a-f]{16}", line)[-1].encode() + b"\\n"
    listing, reading = "wc -c" in line, "head -c" in line
    if "cd --" not in line and not reading:
        out.write(mark)
        continue
    if mode == "silent":
        time.sleep(3600)
    if mode == "flood":
        endless()
    if mode == "flood of lines":
        endless(b"5 record.jsonl\\n" * 1000)
    if mode == "trickle":
        while True:
            out.write(b"z")
            time.sleep(0.01)
    if reading:
        body = b'{"step":3,"time":3,"loss":1}\\n' if "+1 -- /p/record.jsonl" in line else b""
        if mode == "more than asked":
            body = b"w" * 10**6
    elif listing:
        body = {
            "non-numeric": b"many record.jsonl\\n",
            "no name": b"29\\n",
            "blank": b"\\n\\n   \\n",
            "negative": b"-5 record.jsonl\\n",
            "endless number": b"9" * 5000 + b" record.jsonl\\n",
            "nothing": b"",
            "huge": b"900000000000000 record.jsonl\\n3000000000 recipe.yaml\\n900000000000000 record.index.jsonl\\n",
            "some bad": b"\\nmany recipe.yaml\\n29 record.jsonl\\n",
        }.get(mode, b"29 record.jsonl\\n")
    else:
        body = b"record.jsonl\\n"
        if mode == "escapes":
            body = b"\\x1b]0;owned\\x07\\x1b[31mevil\\xe2\\x80\\xae/record.jsonl\\n"
        if mode == "strange names":
            body = b"../../etc/passwd\\n/etc/shadow\\na/b/c/d/e/record.jsonl\\n\\nrecord.jsonl\\n"
    out.write(body + mark)
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_module, "ANSWER_TIMEOUT", 3.0)
    monkeypatch.setattr(ssh_module, "MIN_BYTES_PER_SECOND", 2**23)


def command(tmp_path: Path, mode: str) -> str:
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE)
    return f"{sys.executable} {fake} '{mode}'"


def opened(tmp_path: Path, mode: str) -> RunView:
    return RunView(SshRunLocation(SshConnection(parse_address("ssh://host/p")[0], command(tmp_path, mode)), "/p"))


BAD = ["non-numeric", "no name", "blank", "negative", "endless number", "silent", "flood", "flood of lines",
       "flood before hello", "flood on stderr", "trickle"]  # fmt: skip


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("mode", BAD)
def test_an_invalid_response_is_a_read_error_of_that_run(tmp_path: Path, mode: str) -> None:
    run = opened(tmp_path, mode)
    begun = time.monotonic()
    run.refresh()
    assert run.read_error is not None
    assert "this is a bug" not in run.read_error
    assert time.monotonic() - begun < 60
    assert run.last_step is None
    run.refresh()  # which waits before it reconnects, and reports it
    assert run.read_error is not None
    run.status()


def test_only_the_last_line_of_stderr_is_kept(tmp_path: Path) -> None:
    run = opened(tmp_path, "flood on stderr")
    run.refresh()
    assert run.read_error is not None
    assert run.read_error.endswith("last words \x1b[31m")
    assert len(run.read_error) < 1000
    assert "\x1b" not in sanitize(run.read_error)


@pytest.mark.parametrize("mode", ["huge", "some bad"])
def test_reported_sizes_are_not_trusted(tmp_path: Path, mode: str) -> None:
    """The record ends long before the size that was named; recipe.yaml of 3 GB is not asked for."""
    run = opened(tmp_path, mode)
    run.refresh()
    assert (run.last_step, run.read_error) == (3, None)
    assert not run.refresh()


def test_more_than_was_asked_for_is_refused(tmp_path: Path) -> None:
    run = opened(tmp_path, "more than asked")
    run.refresh()
    assert "more than" in str(run.read_error)


def test_names_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["watch", "--once", "ssh://host/p", "--ssh", command(tmp_path, "escapes")])
    assert done.exit_code == 0, done.output
    assert "evil" in done.output
    assert not {"\x1b", "\x07", "\u202e"} & set(done.output)
    locations = find_runs(["ssh://host/p"], command(tmp_path, "strange names"))
    assert [location.directory for location in locations] == ["/p"]  # type: ignore[attr-defined]


def test_a_flood_of_names_is_cut_off(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="more than"):
        find_runs(["ssh://host/p"], command(tmp_path, "flood of lines"))
