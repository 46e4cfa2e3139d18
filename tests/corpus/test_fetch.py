"""Downloads from web servers that cut, stall, lie and change their mind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.download_server import Content, Page, Server, Text, serving
from zero2all.base.errors import DiskFullError, UsageError, Z2aError
from zero2all.base.network import http_client
from zero2all.base.network.http_client import HttpError
from zero2all.cli.main import app
from zero2all.corpus.fetch import FetchOptions, FetchResult, fetch_files
from zero2all.corpus.fetch import fetch as fetch_module
from zero2all.corpus.fetch.download import PartialFile, run_all
from zero2all.corpus.fetch.remote_file import RemoteFile

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.001)
    for name in (*PROXIES, *map(str.upper, PROXIES), "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as one:
        yield one


def fetch(url: str | list[str], to: Path, **options: Any) -> FetchResult:
    return fetch_files([url] if isinstance(url, str) else url, to, FetchOptions(**{"timeout": 20.0, **options}))


def files_in(directory: Path) -> dict[str, bytes]:
    """Without what a download notes for itself."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in ("fetch.json", "lock")
    }


def entries(directory: Path) -> dict[str, dict[str, Any]]:
    return {one["path"]: one for one in json.loads((directory / "fetch.json").read_text())["files"]}


@pytest.mark.parametrize("reset", [False, True])
def test_a_file_arrives_whole_over_connections_that_are_cut(reset: bool, server: Server, tmp_path: Path) -> None:
    page = Page(Content(6_000_001), cut_after=400_000, reset=reset)
    url = server.add("/big.bin", page)
    result = fetch(url, tmp_path)
    assert files_in(tmp_path) == {"big.bin": page.content.read(0, 6_000_001)}
    assert (result.files, result.bytes, result.downloaded_bytes) == (1, 6_000_001, 6_000_001)
    assert len(server.requests("/big.bin")) > 15
    [entry] = entries(tmp_path).values()
    assert (entry["url"], entry["size"], entry["sha256"]) == (url, 6_000_001, page.content.sha256())


@pytest.mark.parametrize("options", [{}, {"chunked": True}, {"chunked": True, "etag": None}])
def test_a_server_without_ranges_sends_the_file_again(options: dict[str, Any], server: Server, tmp_path: Path) -> None:
    page = Page(Content(3_000_000), ranges=False, cut_after=1_000_000, cuts=2, **options)
    fetch(server.add("/a.bin", page), tmp_path)
    assert files_in(tmp_path) == {"a.bin": page.content.read(0, 3_000_000)}
    assert entries(tmp_path)["a.bin"]["size"] == 3_000_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shift": 1}, r"the server sent the wrong part \(Content-Range: bytes \d+-"),
        ({"shift": -1}, "the server sent the wrong part"),
        ({"length": 2_900_000}, "the server sends 2900000 bytes, not 3000000"),
    ],
)
def test_wrong_answers_after_a_right_one_are_an_error(
    change: dict[str, Any], message: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Page(Content(3_000_000), cut_after=1_000_000)
    url = server.add("/a.bin", page)
    monkeypatch.setattr(fetch_module, "_check_space", lambda *_: page.__dict__.update(change))  # after the first
    with pytest.raises(Z2aError, match=message):
        fetch(url, tmp_path)
    assert "a.bin" not in files_in(tmp_path)


BOUNDED = range(1, 2 * http_client.MAX_FAILURES + 1)


def redirect(place: str) -> Page:
    return Page(Content(10), always=(302, {"Location": place}))


def cut_page(chunked: bool) -> Page:
    return Page(Content(500_000), ranges=False, chunked=chunked, cut_after=60_000)


# A page, how it is refused, and after how many requests.
REFUSED: dict[str, tuple[Page, str, range]] = {
    **{
        f"cuts without ranges, {chunked=}": (cut_page(chunked), "a.bin: .*, 6 times in a row", BOUNDED)
        for chunked in (False, True)
    },
    "range": (Page(Content(200_000), shift=1), "without a valid Content-Range", BOUNDED),
    "length": (Page(Content(200_000), ranges=False, length=300_000), "no answer from 127.0.0.1", BOUNDED),
    "500": (Page(Content(10), always=(500, {})), "status 500 from 127.0.0.1, 6 times in a row", BOUNDED),
    "429": (Page(Content(10), always=(429, {"Retry-After": "4000"})), "the server asks to wait 1h06m", BOUNDED),
    "204": (Page(Content(10), always=(204, {})), "status 204", BOUNDED),
    **{
        str(status): (Page(Content(10), always=(status, {})), f"status {status}: .*{message}", range(1, 2))
        for status, message in ((404, "no such file"), (403, "denies access"), (410, "removed"), (401, "login"))
    },
    **{
        place: (redirect(place), "redirected to .*, which is not http", BOUNDED)
        for place in ("file:///etc/hostname", "ftp://127.0.0.1/a", "data:,x", "http://:80/", "//[", "gopher:x")
    },
    "redirect to itself": (redirect("/a.bin"), "more than 10 redirects", range(11, 12)),
}


@pytest.mark.parametrize(("page", "message", "requests"), REFUSED.values(), ids=REFUSED)
def test_after_a_bounded_number_of_requests_it_fails(
    page: Page, message: str, requests: range, server: Server, tmp_path: Path
) -> None:
    url = server.add("/a.bin", page)
    with pytest.raises(Z2aError, match=message):
        fetch(url, tmp_path)
    assert len(server.seen) in requests
    assert all(name.endswith(".partial") for name in files_in(tmp_path))
    assert arrived(tmp_path) <= page.sent


def test_passing_failures_are_tried_again(server: Server, tmp_path: Path) -> None:
    trouble = [(503, {"Retry-After": "0"}), (502, {}), (429, {}), None, (500, {}), (408, {})]
    url = server.add("/a.bin", Page(Content(100_000), first=[*trouble]))
    fetch(url, tmp_path)
    assert len(files_in(tmp_path)["a.bin"]) == 100_000


@pytest.mark.parametrize("trickle", [False, True])
def test_a_connection_that_stalls_is_given_up(trickle: bool, server: Server, tmp_path: Path) -> None:
    page = Page(Content(200_000), hold_after=100_000, trickle=trickle)
    url = server.add("/a.bin", page)
    fetch(url, tmp_path, timeout=1.0)
    # The first connection brings 100,000 bytes and then nothing, or next to nothing.
    assert len(server.requests("/a.bin")) >= 3
    if not trickle:
        assert files_in(tmp_path) == {"a.bin": page.content.read(0, 200_000)}


def test_no_more_is_downloaded_than_is_allowed_or_announced(server: Server, tmp_path: Path) -> None:
    page = Page(Content(700_000))
    with pytest.raises(UsageError, match=r"a.bin has 700KB, more than 500KB"):
        fetch(server.add("/a.bin", page), tmp_path, max_size=500_000)
    assert page.sent <= 1
    url = server.add("/a.bin", Page(Content(100_000), ranges=False, endless=True))
    with pytest.raises(Z2aError, match=r"does not say its size, and it is larger than 2.00MB: raise --max-size"):
        fetch(url, tmp_path, max_size=2_000_000)
    assert files_in(tmp_path) == {}
    page = Page(Content(100_000), chunked=True, length=99_999)
    fetch(server.add("/a.bin", page), tmp_path)
    assert files_in(tmp_path) == {"a.bin": page.content.read(0, 99_999)}


def test_a_wrong_checksum_is_refused_and_nothing_is_left(server: Server, tmp_path: Path) -> None:
    url = server.add("/a.bin", Page(Content(300_000)))
    wrong = "0" * 64
    with pytest.raises(Z2aError, match=f"its checksum is sha256:[0-9a-f]+, not sha256:{wrong}: the file was rejected"):
        fetch(url, tmp_path, sha256=wrong)
    assert files_in(tmp_path) == {}
    fetch(url, tmp_path, sha256=Content(300_000).sha256().upper())
    assert list(files_in(tmp_path)) == ["a.bin"]


def test_a_password_goes_to_its_server_only_and_is_written_nowhere(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Server()) as other:
        other.add("/b.bin", Page(Content(100)))
        server.add("/a.bin", Page(Content(100), always=(302, {"Location": f"{other.url}/b.bin"})))
        server.add("/c.bin", Page(Content(100), always=(404, {})))
        login = server.url.replace("http://", "http://bob:s3cr3t@")
        fetch(f"{login}/a.bin", tmp_path)
        with pytest.raises(Z2aError) as error:
            fetch(f"{login}/c.bin", tmp_path)
    assert all(one.headers["Authorization"] == "Basic Ym9iOnMzY3IzdA==" for one in server.seen)
    assert other.seen
    assert not any("Authorization" in one.headers for one in other.seen)
    said = capsys.readouterr()
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert "s3cr3t" not in f"{said.out}{said.err}{error.value}"
    assert b"s3cr3t" not in written
    assert entries(tmp_path)["a.bin"]["url"].startswith("http://bob:***@")


def test_the_same_command_downloads_only_a_new_version_again(server: Server, tmp_path: Path) -> None:
    page = Page(Content(300_000))
    url = server.add("/a.bin", page)
    fetch(url, tmp_path)
    sent = page.sent
    result = fetch(url, tmp_path)
    assert (result.files, result.downloaded_files) == (1, 0)
    assert page.sent - sent <= 1  # only the first byte, to learn the size
    os.utime(tmp_path / "a.bin", (1, 1))  # a copy of the directory may have other times
    assert fetch(url, tmp_path).downloaded_files == 0
    server.add("/a.bin", Page(Content(300_000, seed=1), etag='"v2"'))
    assert fetch(url, tmp_path).downloaded_files == 1
    assert files_in(tmp_path) == {"a.bin": Content(300_000, seed=1).read(0, 300_000)}


def test_files_of_others_are_not_overwritten(server: Server, tmp_path: Path) -> None:
    url = server.add("/a.txt", Page(Text(b"theirs")))
    (tmp_path / "a.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists and is not from this command"):
        fetch(url, tmp_path)
    (tmp_path / "a.txt").unlink()
    fetch(url, tmp_path)
    (tmp_path / "a.txt").write_text("edited")
    with pytest.raises(UsageError, match="was changed after its download"):
        fetch(url, tmp_path)
    (tmp_path / "a.txt").write_text("theirs")
    other = server.add("/else/a.txt", Page(Text(b"third")))
    with pytest.raises(UsageError, match=r"a.txt is from http.*/a.txt: use another --to"):
        fetch(other, tmp_path)
    with pytest.raises(UsageError, match=r"two files would be written to a.txt"):
        fetch([url, other], tmp_path / "new")
    assert files_in(tmp_path) == {"a.txt": b"theirs"}


def test_a_link_in_the_directory_does_not_lead_out_of_it(server: Server, tmp_path: Path) -> None:
    url = server.add("/a.txt", Page(Text(b"text")))
    (tmp_path / "outside").mkdir()
    to = tmp_path / "to"
    to.mkdir()
    (to / "a.txt").symlink_to(tmp_path / "outside" / "b.txt")
    fetch(url, to)
    assert not list((tmp_path / "outside").iterdir())
    assert not (to / "a.txt").is_symlink()


def test_another_version_on_the_server_starts_over(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Page(Content(2_000_000), cut_after=600_000, cuts=2)
    old.first = [None, None, None, *[(500, {})] * 20]
    url = server.add("/a.bin", old)
    with pytest.raises(Z2aError, match="status 500"):
        fetch(url, tmp_path)
    assert any(name.endswith(".partial") for name in files_in(tmp_path))
    server.add("/a.bin", Page(Content(2_000_000, seed=1), etag='"v2"'))
    fetch(url, tmp_path)
    assert files_in(tmp_path) == {"a.bin": Content(2_000_000, seed=1).read(0, 2_000_000)}


class Replaced(Content):
    """A file that a server replaces, with its validator, after some reads."""

    page: Page
    every = 5
    versions = 2
    reads = 0

    def read(self, start: int, stop: int) -> bytes:
        type(self).reads += 1
        if self.reads % self.every == 0 and self.reads < self.versions * self.every:
            self.page.etag = f'"v{self.reads}"'
        return Content(self.size, seed=int((self.page.etag or '"v1"')[2:-1])).read(start, stop)


def replaced(every: int, versions: int, **options: Any) -> Page:
    kind = type("One", (Replaced,), {"every": every, "versions": versions})
    page = Page(kind(2_000_000), **options)
    kind.page = page
    return page


def test_a_file_that_changes_during_the_download_starts_over_and_is_not_mixed(server: Server, tmp_path: Path) -> None:
    page = replaced(5, 2, cut_after=300_000)
    fetch(server.add("/a.bin", page), tmp_path)
    content = files_in(tmp_path)["a.bin"]
    assert content == Content(2_000_000, seed=int((page.etag or "")[2:-1])).read(0, 2_000_000)
    assert page.etag != '"v1"'
    assert any("If-Range" in one.headers for one in server.seen)
    assert entries(tmp_path)["a.bin"]["identity"].endswith(f"etag:{page.etag}")


def test_a_file_that_changes_all_the_time_is_given_up(server: Server, tmp_path: Path) -> None:
    page = replaced(3, 1000, cut_after=300_000)
    with pytest.raises(Z2aError, match="has changed on the server"):
        fetch(server.add("/a.bin", page), tmp_path)
    assert "a.bin" not in files_in(tmp_path)
    assert len(server.seen) < 100


@pytest.mark.parametrize("later", [None, '"v2"', 'W/"v1"'])
def test_parts_without_the_validator_of_the_first_answer_are_not_combined(
    later: str | None, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Page(Content(2_000_000))
    url = server.add("/a.bin", page)
    real = server.answer

    def answer(request: Any) -> None:
        page.etag = '"v1"' if request.headers.get("Range") == "bytes=0-0" else later
        real(request)

    monkeypatch.setattr(server, "answer", answer)
    with pytest.raises(Z2aError, match="has changed on the server"):
        fetch(url, tmp_path, workers=1)
    assert "a.bin" not in files_in(tmp_path)
    assert len(server.seen) < 100


@pytest.mark.parametrize("etag", [None, 'W/"v1"'])
def test_without_a_strong_validator_a_file_comes_from_one_response(
    etag: str | None, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Page(Content(2_000_000), etag=etag, cut_after=1_500_000, cuts=2)
    fetch(server.add("/a.bin", page), tmp_path)
    assert files_in(tmp_path) == {"a.bin": page.content.read(0, 2_000_000)}
    assert [one.headers.get("Range") for one in server.requests("/a.bin")] == ["bytes=0-0", None, None, None]
    never = server.add("/b.bin", Page(Content(2_000_000), etag=etag, cut_after=1_500_000))
    with pytest.raises(Z2aError, match="6 times in a row"):
        fetch(never, tmp_path)


@contextmanager
def raw_server(answer: Callable[[socket.socket], None], address: str = "127.0.0.1") -> Iterator[str]:
    """A server that sends what it likes, until the other side closes the connection."""
    with socket.create_server((address, 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=one, args=(connection,), daemon=True).start()

        def one(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                connection.recv(65536)
                answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://{address}:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "endless", "pause"),
    [(b"HTTP/1.1 200 OK\r\nX: ", b"x", 0.02), (b"", INTERIM, 0.001), (b"", INTERIM * 1000, 0)],
    ids=["a long header", "interim answers", "a flood of interim answers"],
)
def test_headers_that_do_not_end_are_given_up(
    first: bytes, endless: bytes, pause: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(first)
        while True:
            connection.sendall(endless)
            time.sleep(pause)

    monkeypatch.setattr(http_client, "MAX_FAILURES", 2)
    with raw_server(answer) as url:
        started = time.monotonic()
        with pytest.raises(Z2aError, match=r"no answer from 127.0.0.1"):
            fetch(f"{url}/a.bin", tmp_path, timeout=0.3)
        assert time.monotonic() - started < 15


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "169.254.169.254"])
def test_a_redirect_from_the_internet_does_not_lead_into_a_private_network(
    name: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """127.0.0.2 stands for a server on the internet."""
    real = http_client.is_private_address
    monkeypatch.setattr(http_client, "is_private_address", lambda address: address != "127.0.0.2" and real(address))
    if name == "169.254.169.254":  # the address of a name is that of the connection, not of an earlier lookup
        lookup = socket.getaddrinfo
        names = {name: "127.0.0.1"}
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **b: lookup(names.get(host, host), *a, **b))
    server.add("/secret.txt", Page(Text(b"secret")))
    target = server.url.replace("127.0.0.1", name) + "/secret.txt"

    def redirect(connection: socket.socket) -> None:
        connection.sendall(f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode())

    message = "a private network: if that is right, name the URL there yourself"
    with raw_server(redirect, "127.0.0.2") as public, pytest.raises(Z2aError, match=message):
        fetch(f"{public}/a.txt", tmp_path)
    assert server.seen == []
    assert files_in(tmp_path) == {}
    with raw_server(redirect) as private:  # what the user named is in the private network itself
        fetch(f"{private}/a.txt", tmp_path)
    assert files_in(tmp_path) == {"a.txt": b"secret"}


def test_behind_a_proxy_the_name_of_a_redirect_is_checked() -> None:
    guard = http_client._Hops(20.0)
    guard.check_name("example.org")
    for name in ("localhost", "10.0.0.1", "::1"):
        with pytest.raises(HttpError):
            guard.check_name(name)
    for address in ("::ffff:127.0.0.1", "100.64.0.1", "fe80::1", "0.0.0.0", "192.168.1.1"):
        assert http_client.is_private_address(address)
    assert not http_client.is_private_address("8.8.8.8")


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def arrived(directory: Path) -> int:
    """Bytes of unfinished files."""
    return sum(path.stat().st_size for path in directory.rglob("*.partial"))


CHILD = """
import sys
from pathlib import Path
from zero2all.corpus.fetch import FetchOptions, fetch_files
fetch_files([sys.argv[1]], Path(sys.argv[2]), FetchOptions(workers=2))
"""


@pytest.mark.long
def test_a_killed_download_resumes_and_two_at_once_are_refused(server: Server, tmp_path: Path) -> None:
    page = Page(Content(8_000_000), hold_after=700_000)
    url = server.add("/a.bin", page)
    child = subprocess.Popen([sys.executable, "-c", CHILD, url, str(tmp_path)])
    try:
        wait_until(lambda: arrived(tmp_path) >= 600_000)
        with pytest.raises(UsageError, match=f"another download works in .*process {child.pid} on .*--to DIR"):
            fetch(url, tmp_path)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(60)
    page.release.set()
    page.hold_after, before = None, page.sent
    fetch(url, tmp_path)
    assert files_in(tmp_path) == {"a.bin": page.content.read(0, 8_000_000)}
    assert page.sent - before <= 7_400_000  # of 8,000,000: what had arrived was not sent again


@pytest.mark.slow
def test_ctrl_c_keeps_what_has_arrived(server: Server, tmp_path: Path) -> None:
    page = Page(Content(8_000_000), hold_after=5_000_000)
    done, url = server.add("/done.bin", Page(Content(1000))), server.add("/a.bin", page)
    command = [sys.executable, "-m", "zero2all.cli", "corpus", "fetch", done, url, "--to", str(tmp_path)]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: (tmp_path / "done.bin").exists() and arrived(tmp_path) >= 4_500_000)
    child.send_signal(signal.SIGINT)
    began = time.monotonic()
    said = child.communicate(timeout=60)[1]
    assert child.returncode == 1
    assert "run the same command again to continue" in said
    assert time.monotonic() - began < 20  # it does not wait for the server
    assert list(entries(tmp_path)) == ["done.bin"]
    page.release.set()
    page.hold_after, before = None, page.sent
    fetch([done, url], tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == page.content.read(0, 8_000_000)
    assert page.sent - before < 4_000_000


def test_a_disk_without_space_is_named(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(Content(300_000))
    url = server.add("/a.bin", page)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=299_999))
    with pytest.raises(DiskFullError, match="at least 300KB are needed"):
        fetch(url, tmp_path)
    assert page.sent <= 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=300_000))
    fetch(url, tmp_path)
    # What arrives is written to a device that is always full.
    monkeypatch.setattr(PartialFile, "open", lambda partial: os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb"))
    with pytest.raises(DiskFullError, match=f"no space left for {tmp_path}"):
        fetch(server.add("/b.bin", Page(Content(300_000))), tmp_path)


def test_one_bad_file_does_not_stop_the_others(server: Server, tmp_path: Path) -> None:
    urls = [server.add(f"/{number}.bin", Page(Content(1000, seed=number))) for number in range(20)]
    server.pages["/3.bin"].first = [None, (404, {})]
    with pytest.raises(Z2aError, match=r"1 of 20 files could not be downloaded.*\n.*/3.bin: status 404"):
        fetch(urls, tmp_path)
    assert len(files_in(tmp_path)) == 19
    assert fetch(urls, tmp_path).downloaded_files == 1


def test_a_server_that_is_gone_is_not_asked_for_every_file(server: Server, tmp_path: Path) -> None:
    urls = [server.add(f"/{number}.bin", Page(Content(1000))) for number in range(30)]
    for page in server.pages.values():
        page.first = [None, (404, {})]
    with pytest.raises(Z2aError, match=r"files could not be downloaded, .* were not tried"):
        fetch(urls, tmp_path, workers=2)
    assert len(server.seen) < 30 + 15


def test_a_proxy_of_the_environment_is_used(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    server.add("/a.bin", Page(Content(1000)))
    fetch("http://data.invalid/a.bin", tmp_path)
    assert server.seen[0].path == "http://data.invalid/a.bin"
    assert files_in(tmp_path) == {"a.bin": Content(1000).read(0, 1000)}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_an_untrusted_certificate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = tmp_path / "server.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=127.0.0.1 -days 2"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(certificate), "-out", str(certificate)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    with serving(Server(certificate)) as server:
        url = server.add("/a.bin", Page(Content(1000)))
        with pytest.raises(Z2aError, match=r"certificate of 127.0.0.1 is not trusted \(self.signed.*SSL_CERT_FILE"):
            fetch(url, tmp_path / "to")
        assert not server.seen
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        fetch(url, tmp_path / "to")
        assert files_in(tmp_path / "to") == {"a.bin": Content(1000).read(0, 1000)}


def test_nothing_is_decompressed_and_names_are_decoded(server: Server, tmp_path: Path) -> None:
    page = Page(Text(b"\x1f\x8bnot really"))
    url = server.add("/数据 1.json.gz", page)
    fetch(url, tmp_path)
    assert files_in(tmp_path) == {"数据 1.json.gz": b"\x1f\x8bnot really"}
    assert {one.headers.get("Accept-Encoding") for one in server.seen} == {"identity"}


@pytest.mark.parametrize("name", ["..", "%2e%2e", "%2Fetc%2Fpasswd", "a%5Cb", "x" * 256, "a%00b", "fetch.json"])
def test_names_in_urls_do_not_lead_out(name: str, server: Server, tmp_path: Path) -> None:
    server.pages = {f"/{one}": Page(Text(b"x")) for one in ("", "..", "/etc/passwd", "a\\b", "x" * 256, "a\0b", name)}
    with pytest.raises(UsageError, match=r"the server names a file|no file name"):
        fetch(f"{server.url}/{name}", tmp_path / "to")
    assert not list(tmp_path.iterdir())


def test_the_command_prints_one_object(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = server.add("/books.txt", Page(Text(b"Once upon a time.\n")))
    with pytest.raises(SystemExit) as stop:
        app(["corpus", "fetch", url, "--to", str(tmp_path / "raw"), "--json"])
    assert stop.value.code in (None, 0)
    printed = json.loads(capsys.readouterr().out)
    assert (printed["files"], printed["downloaded_bytes"]) == (1, 18)
    assert printed["sources"][0]["name"] == "raw"
    assert printed["sources"][0]["paths"] == [str(tmp_path / "raw" / "books.txt")]


# --- what needs no server: what has arrived, redirects, threads


def remote(**changes: Any) -> RemoteFile:
    given = {"source": "s", "url": "http://h/a", "path": "a", "size": 1000, "validator": 'etag:"1"'} | changes
    return RemoteFile(**{"has_strong_validator": True, **given})


def begin(work: Path, file: RemoteFile, size: int = 300) -> PartialFile:
    begun = PartialFile(file, work)
    stream = begun.open()
    stream.write(bytes(size))
    begun.close(stream)
    return begun


OTHER_VERSIONS = (
    *(("validator", value) for value in ('etag:"2"', None, f"sha256:{'0' * 64}")),
    *(("size", 1001), ("size", None), ("url", "http://other/a")),
)


@pytest.mark.parametrize(
    ("before", "changes", "found"),
    [
        ({}, {}, 300),
        ({"validator": "sha256:1"}, {"validator": "sha256:1", "url": "http://mirror/a"}, 300),  # at any URL
        *(({}, {name: value}, 0) for name, value in OTHER_VERSIONS),
    ],
)
def test_bytes_that_have_arrived_are_those_of_this_version(
    before: dict[str, Any], changes: dict[str, Any], found: int, tmp_path: Path
) -> None:
    first = begin(tmp_path, remote(**before))
    again = PartialFile(remote(**changes), tmp_path)
    assert again.present == found
    with again.open() as stream:
        assert stream.tell() == found
    assert [first.path.exists(), again.path.exists()] == [found > 0, True]


@pytest.mark.parametrize("changes", [{"validator": None, "has_strong_validator": False}, {"size": None}])
def test_what_cannot_be_continued_is_not_kept(changes: dict[str, Any], tmp_path: Path) -> None:
    assert not begin(tmp_path, remote(**changes)).path.exists()
    begin(tmp_path, remote()).path.write_bytes(bytes(1001))  # more than the file has
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
