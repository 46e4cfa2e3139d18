"""The parts of a download that need no server: the journal, ranges, waiting, redirects."""

from __future__ import annotations

import email.utils
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from zero2all.corpus.fetch import http_client, retry
from zero2all.corpus.fetch.http_client import FetchError, TransientError
from zero2all.corpus.fetch.jobs import Job, run_jobs
from zero2all.corpus.fetch.partial_file import ByteRange, PartialFile, merge_ranges, missing_ranges
from zero2all.corpus.fetch.remote_file import RemoteFile
from zero2all.corpus.fetch.retry import Backoff, Stopped


@pytest.fixture(autouse=True)
def journals_of_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartialFile, "SAVE_BYTES", 10)


def remote(**changes: Any) -> RemoteFile:
    given = {"source": "s", "url": "http://h/a", "path": "a", "size": 1000, "validator": 'etag:"1"'} | changes
    return RemoteFile(**{"has_strong_validator": True, **given})


def begin(work: Path, file: RemoteFile) -> PartialFile:
    partial = PartialFile(file, work)
    partial.open()
    partial.write(0, bytes(100))
    partial.save(0, 100)
    partial.write(300, bytes(200))
    partial.save(300, 500)
    partial.close()
    return partial


SAVED = [ByteRange(0, 100), ByteRange(300, 500)]


def test_saved_ranges_are_found_again(tmp_path: Path) -> None:
    begin(tmp_path, remote())
    assert PartialFile(remote(), tmp_path).open() == SAVED
    assert PartialFile(remote(), tmp_path).read_ranges() == SAVED


@pytest.mark.parametrize(
    "changes",
    [
        {"validator": 'etag:"2"'}, {"size": 1001}, {"url": "http://other/a"}, {"validator": None}, {"size": None},
        {"validator": f"sha256:{'0' * 64}"},
    ],
)  # fmt: skip
def test_ranges_of_another_version_are_discarded(changes: dict[str, Any], tmp_path: Path) -> None:
    begin(tmp_path, remote())
    other = PartialFile(remote(**changes), tmp_path)
    assert other.open() == []
    assert other.data_path.stat().st_size == 0


def test_a_checksum_identifies_a_file_at_any_url(tmp_path: Path) -> None:
    begin(tmp_path, remote(validator="sha256:1"))
    assert PartialFile(remote(validator="sha256:1", url="http://mirror/a"), tmp_path).read_ranges() == SAVED


def test_without_a_validator_nothing_is_resumed(tmp_path: Path) -> None:
    begin(tmp_path, remote(validator=None))
    assert PartialFile(remote(validator=None), tmp_path).read_ranges() == []


@pytest.mark.parametrize("end", ["60", "600 7", "600 700"])
def test_a_line_that_was_cut_off_is_not_a_range(end: str, tmp_path: Path) -> None:
    partial = begin(tmp_path, remote())
    with open(partial.journal_path, "a") as stream:
        stream.write(end)
    again = PartialFile(remote(), tmp_path)
    assert again.open() == SAVED
    again.save(100, 200)
    assert PartialFile(remote(), tmp_path).read_ranges() == [ByteRange(0, 200), ByteRange(300, 500)]


@pytest.mark.parametrize("line", ["5 3", "-5 10", "0 2000", "400 600", "x y", "1 2 3", "1"])
def test_a_damaged_journal_is_discarded(line: str, tmp_path: Path) -> None:
    """``400 600``: the data ends at 500."""
    partial = begin(tmp_path, remote())
    with open(partial.journal_path, "a") as stream:
        stream.write(f"{line}\n")
    assert PartialFile(remote(), tmp_path).open() == []


def test_missing_and_present_ranges_make_the_file() -> None:
    draw = random.Random(0)
    for _ in range(300):
        size, step = draw.randrange(1, 60), draw.randrange(1, 30)
        present = [ByteRange(start, draw.randrange(start + 1, size + 1)) for start in draw.choices(range(size), k=3)]
        merged = merge_ranges(present)
        missing = missing_ranges(merged, size, step)
        counts = [sum(one.start <= place < one.stop for one in [*merged, *missing]) for place in range(size)]
        assert counts == [1] * size
        assert all(0 < one.length <= step for one in missing)
        assert {place for one in present for place in range(one.start, one.stop)} == {
            place for one in merged for place in range(one.start, one.stop)
        }


class Waits(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0.0)
        return False


def test_waits_grow_and_end() -> None:
    waits = Waits()
    backoff = Backoff("a", waits)
    for _ in range(retry.MAX_FAILURES - 1):
        backoff.wait(TransientError("x"))
    assert all(0.25 * 2**n <= seconds <= 0.5 * 2**n for n, seconds in enumerate(waits.seconds))
    with pytest.raises(FetchError, match="a: x, 6 times in a row"):
        backoff.wait(TransientError("x"))


def test_progress_starts_the_count_over() -> None:
    waits = Waits()
    backoff = Backoff("a", waits)
    for _ in range(10):
        backoff.wait(TransientError("x"))
        backoff.wait(TransientError("x"), has_progressed=True)
    assert waits.seconds[1::2] == [0.0] * 10


def test_a_server_may_ask_for_a_wait() -> None:
    waits = Waits()
    Backoff("a", waits).wait(TransientError("x", retry_after=17.0))
    assert waits.seconds == [17.0]
    assert http_client._retry_after("120") == 120.0
    assert http_client._retry_after("soon") is None
    assert http_client._retry_after("") is None
    date = email.utils.formatdate(time.time() + 60, usegmt=True)
    assert 50 < (http_client._retry_after(date) or 0) <= 61


def test_a_wait_ends_when_the_command_does() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        Backoff("a", stop).wait(TransientError("x", retry_after=200.0))


def test_a_redirect_does_not_leave_encryption() -> None:
    with pytest.raises(FetchError, match="from https:// to http://"):
        http_client._redirect_target("https://a/x", "https://a/x", "http://a/x")
    assert http_client._redirect_target("http://a/x", "http://a/x", "https://b/y?z=1#part") == "https://b/y?z=1"
    assert http_client._redirect_target("https://a/x", "https://a/x/y", "z") == "https://a/x/z"
    assert http_client._redirect_target("https://a/", "https://a/", "https://bob:pw@b/y") == "https://b/y"
    as_received = "/数据".encode().decode("latin-1")
    assert http_client._redirect_target("http://a/", "http://a/", as_received) == "http://a/数据"


def test_jobs_that_a_job_returns_go_first_and_all_are_run() -> None:
    order: list[str] = []

    def job(name: str, more: list[Job]) -> Job:
        def run() -> list[Job]:
            order.append(name)
            return more

        return run

    run_jobs([job("a", [job("a1", []), job("a2", [])]), job("b", [job("b1", [])])], 1, threading.Event())
    assert order == ["a", "a1", "a2", "b", "b1"]
    order.clear()
    run_jobs([job(str(number), [job("more", [])]) for number in range(100)], 8, threading.Event())
    assert len(order) == 200


def test_the_first_error_stops_all_jobs() -> None:
    stop, ran = threading.Event(), []

    def fail() -> list[Job]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_jobs([fail, lambda: ran.append(1) or []], 1, stop)  # type: ignore[func-returns-value]
    assert stop.is_set()
    assert not ran
