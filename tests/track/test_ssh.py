"""A run at the other end of a real ssh connection: an sshd of our own on loopback, with keys made for the test."""

from __future__ import annotations

import contextlib
import getpass
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sshd import answers, sshd, wait_for, write_client
from tests.track.browser import watching
from tests.track.runs import record_steps, recording, spy_reads
from zero2all.base.errors import UsageError
from zero2all.track.run_locations import find_runs
from zero2all.track.run_view import RunView
from zero2all.track.ssh import SshConnection, UnreachableError, parse_address


class Wire:
    """Passes bytes between a client and sshd until it is disconnected; then no connection gets through."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.listens_on_ipv6 = False
        self._sockets: list[socket.socket] = []
        self._disconnected = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def disconnect(self) -> None:
        self._disconnected.set()
        for end in self._sockets:
            with_shutdown(end)
        self._sockets.clear()

    def restore(self) -> None:
        self._disconnected.clear()

    def close(self) -> None:
        self.disconnect()
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            if self._disconnected.is_set():
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self.target))
            self._sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pass(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        with_shutdown(source)
        with_shutdown(sink)


def with_shutdown(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Wire, Path]]:
    """A running sshd behind a wire, and the directory with its client's configuration."""
    home = tmp_path_factory.mktemp("ssh")
    with sshd(home) as port, contextlib.closing(Wire(port)) as wire:
        write_client(home, wire.port, "host")
        wire.listens_on_ipv6 = answers(port, "::1")
        yield wire, home


def test_the_page_follows_a_remote_run_and_no_step_is_missing_after_a_disconnect(
    remote: tuple[Wire, Path], tmp_path: Path
) -> None:
    wire, home = remote
    directory = tmp_path / "it's a $(run) dir" / "run"  # quoted on its way through the shells
    with recording(directory) as record:
        record.event("start", step=0, steps=1000)
        written = 0

        def write(until: int) -> None:
            nonlocal written
            for step in range(written, until):
                record.step(step, loss=float(step))
            written = until
            assert record.flush(10)

        write(200)
        target = f"ssh://there{directory.parent}"
        with watching(target, "--ssh", f"ssh -F {home}/client_host") as (url, _):

            def steps() -> list[float]:
                address = url.replace("/?", "/api/runs/0/series?name=loss&points=20000&")
                with urllib.request.urlopen(address, timeout=60) as answer:
                    found: list[float] = json.load(answer)[0]["steps"]
                return found

            def read_error() -> str | None:
                with urllib.request.urlopen(url.replace("/?", "/api/runs?"), timeout=60) as answer:
                    message: str | None = json.load(answer)[0]["status"]["trouble"]
                return message

            assert steps() == list(range(200))
            write(210)
            begun = time.monotonic()
            wait_for(lambda: len(steps()) == 210, "the page does not follow")
            assert time.monotonic() - begun < 30  # 2 s on a machine that is not loaded; see docs/track.md
            wire.disconnect()
            wait_for(read_error, "the disconnect was not noticed")
            write(500)
            wire.restore()
            wait_for(lambda: read_error() is None, "it does not reconnect")
            wait_for(lambda: len(steps()) == 500, "steps are missing")
            assert steps() == list(range(500))


def test_all_runs_of_a_workspace_are_found(remote: tuple[Wire, Path], tmp_path: Path) -> None:
    _, home = remote
    (tmp_path / "elsewhere" / "linked").mkdir(parents=True)
    first = tmp_path / "it's" / "first"
    for run in ("run", "deeper", "experiments/lr/a-seed1", "a/b/c/d/too-deep", "tokens", "x.work", ".hidden"):
        (first / run / "checkpoints").mkdir(parents=True)
        for directory in (first / run, first / run / "checkpoints"):
            (directory / "record.jsonl").write_text("{}")
    (first / "linked").symlink_to(tmp_path / "elsewhere" / "linked")
    (first / "linked" / "record.jsonl").write_text("{}")
    (first / "loop").symlink_to(first)

    def names(target: Path) -> list[str]:
        return [location.name for location in find_runs([f"ssh://there{target}"], f"ssh -F {home}/client_host")]

    assert names(first) == [f"there:{name}" for name in ("deeper", "experiments/lr/a-seed1", "linked", "first")]
    assert names(first / "deeper") == ["there:deeper"]
    below = ["first/deeper", "first/experiments/lr/a-seed1", "first/linked", "first"]
    assert names(first.parent) == [f"there:{name}" for name in below]


def test_a_wrong_host_key_is_refused(remote: tuple[Wire, Path], tmp_path: Path) -> None:
    wire, home = remote
    write_client(home, wire.port, "other")
    with pytest.raises(UnreachableError, match="Host key verification failed"):
        find_runs([f"ssh://there{tmp_path}"], f"ssh -F {home}/client_other")


def test_a_long_record_is_opened_by_its_index_and_read_only_where_it_is_viewed(
    remote: tuple[Wire, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, home = remote
    record_steps(tmp_path, range(3000))
    [location] = find_runs([f"ssh://there{tmp_path}"], f"ssh -F {home}/client_host")
    asked = spy_reads(location, monkeypatch)
    monkeypatch.setattr("zero2all.track.record_reader.MAX_RAW_BYTES", 20_000)
    run = RunView(location)
    run.refresh()
    assert run.read_error is None
    table = run.table(["loss"], points=100)
    assert table.high is not None
    assert max(table.high["loss"]) == 2999
    assert sum(length for file, length in asked if file == "record.jsonl") < 5000, "only the end of it was fetched"
    assert run.table(["loss"], 1000, 1010).mean["loss"].tolist() == list(range(1000, 1011))


INVALID = [
    "-oProxyCommand=touch/x", "user@-oProxyCommand=x/y", "-l@host/x", "host", "host/", "host:port/x", "ho st/x",
    "host/a%0ab",
]  # fmt: skip


@pytest.mark.parametrize("address", INVALID)
def test_invalid_addresses_are_rejected(address: str) -> None:
    with pytest.raises(UsageError, match="is not ssh://"):
        parse_address(f"ssh://{address}")


@pytest.mark.parametrize(
    ("url", "words", "path"),
    [
        ("ssh://me@cluster:2222/runs/my%20run/", ["-p", "2222", "--", "me@cluster"], "/runs/my run"),
        ("ssh://cluster/~/runs", ["--", "cluster"], "runs"),
        ("ssh://[::1]:22/p", ["-p", "22", "--", "::1"], "/p"),
        ("ssh://me@[2001:db8::5]/p", ["--", "me@2001:db8::5"], "/p"),
        ("ssh://[fe80::1%25eth0]/p", ["--", "fe80::1%eth0"], "/p"),
    ],
)
def test_an_address_has_user_host_port_and_path(url: str, words: list[str], path: str) -> None:
    address, found = parse_address(url)
    assert (address.ssh_arguments, found) == (words, path)


def test_without_ssh_the_error_names_openssh() -> None:
    address, path = parse_address("ssh://host/x")
    with pytest.raises(UsageError, match="OpenSSH"):
        SshConnection(address, "no-such-ssh").find_files(path, "record.jsonl", 4, [])


def test_an_ipv6_address_is_reached(remote: tuple[Wire, Path], tmp_path: Path) -> None:
    wire, home = remote
    if not wire.listens_on_ipv6:
        pytest.skip("no IPv6 loopback here")
    record_steps(tmp_path, [7])
    (home / "client_ipv6").write_text(
        f"IdentityFile {home}/user\nIdentitiesOnly yes\nUserKnownHostsFile /dev/null\nStrictHostKeyChecking no\n"
        "BatchMode yes\nLogLevel ERROR\n"
    )
    [location] = find_runs([f"ssh://{getpass.getuser()}@[::1]:{wire.target}{tmp_path}"], f"ssh -F {home}/client_ipv6")
    run = RunView(location)
    run.refresh()
    assert (run.last_step, run.read_error) == (7, None)
    assert location.name.startswith("[::1]:")
