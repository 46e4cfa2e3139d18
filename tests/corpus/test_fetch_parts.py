"""The parts of a download that need no server: what has arrived, waiting, redirects, threads."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from zero2all.base.network import http_client
from zero2all.base.network.http_client import HttpError
from zero2all.corpus.fetch.download import PartialFile, run_all
from zero2all.corpus.fetch.remote_file import RemoteFile


def remote(**changes: Any) -> RemoteFile:
    given = {"source": "s", "url": "http://h/a", "path": "a", "size": 1000, "validator": 'etag:"1"'} | changes
    return RemoteFile(**{"has_strong_validator": True, **given})


def begin(work: Path, file: RemoteFile, size: int = 300) -> PartialFile:
    partial = PartialFile(file, work)
    stream = partial.open()
    stream.write(bytes(size))
    partial.close(stream)
    return partial


def test_what_has_arrived_is_found_again(tmp_path: Path) -> None:
    begin(tmp_path, remote())
    again = PartialFile(remote(), tmp_path)
    assert again.present == 300
    with again.open() as stream:
        assert stream.tell() == 300


@pytest.mark.parametrize(
    "changes",
    [
        {"validator": 'etag:"2"'}, {"size": 1001}, {"url": "http://other/a"}, {"validator": None}, {"size": None},
        {"validator": f"sha256:{'0' * 64}"},
    ],
)  # fmt: skip
def test_bytes_of_another_version_are_discarded(changes: dict[str, Any], tmp_path: Path) -> None:
    first = begin(tmp_path, remote())
    other = PartialFile(remote(**changes), tmp_path)
    assert other.present == 0
    with other.open() as stream:
        assert stream.tell() == 0
    assert [first.path.exists(), other.path.exists()] == [False, True]


def test_a_checksum_identifies_a_file_at_any_url(tmp_path: Path) -> None:
    begin(tmp_path, remote(validator="sha256:1"))
    assert PartialFile(remote(validator="sha256:1", url="http://mirror/a"), tmp_path).present == 300


@pytest.mark.parametrize("changes", [{"validator": None, "has_strong_validator": False}, {"size": None}])
def test_what_cannot_be_continued_is_not_kept(changes: dict[str, Any], tmp_path: Path) -> None:
    assert not begin(tmp_path, remote(**changes)).path.exists()


def test_more_bytes_than_the_file_has_are_discarded(tmp_path: Path) -> None:
    begin(tmp_path, remote()).path.write_bytes(bytes(1001))
    with PartialFile(remote(), tmp_path).open() as stream:
        assert stream.tell() == 0


def test_a_redirect_does_not_leave_encryption() -> None:
    with pytest.raises(HttpError, match="from https:// to http://"):
        http_client._check_redirect("https://a/x", "http://a/x")
    http_client._check_redirect("http://a/x", "https://b/y?z=1#part")
    http_client._check_redirect("https://a/x/y", "z")


@pytest.mark.parametrize("error", [ZeroDivisionError, IndexError])
def test_the_first_error_stops_all_jobs(error: type[Exception]) -> None:
    stop, ran = threading.Event(), list[int]()

    def fail() -> None:
        raise error

    with pytest.raises(error):
        run_all([fail, partial(ran.append, 1)], 1, stop)
    assert stop.is_set()
    assert not ran
