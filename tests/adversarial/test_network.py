"""Whoever can open a connection: noise, lies, slowness, and a page from elsewhere in the same browser."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adversarial.payload import Payload
from tests.track.browser import browser, watching
from zero2all.base.environment import JOB_SECRET_VARIABLE
from zero2all.base.errors import UsageError
from zero2all.base.network.connection import HELLO_BYTES, MAGIC, NAME_BYTES, NONCE_BYTES
from zero2all.base.torch_private import TCPStore
from zero2all.cluster.launch.job_secret import new_secret
from zero2all.cluster.launch.rendezvous_server import RendezvousServer
from zero2all.track.http_server import LoopbackHosts
from zero2all.track.ssh import parse_address

SEED = random.Random(7)
BYTES = SEED.randbytes


def _lying_lengths() -> list[bytes]:
    return [struct.pack(">I", length) + BYTES(50) for length in (0, 1, 31, 32, 1 << 16, 1 << 24, (1 << 32) - 1)]


def noise() -> list[bytes]:
    """What clients that know nothing of the protocol, or half of it, may send."""
    http = [f"{method} / HTTP/1.1\r\nHost: a\r\n\r\n".encode() for method in ("GET", "POST", "CONNECT", "OPTIONS")]
    tls = [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + BYTES(500), b"\x80\x2e\x01\x00\x02" + BYTES(40)]
    begun = [MAGIC[:size] for size in (1, 4, len(MAGIC))]
    hello = [bytes(NONCE_BYTES) + name + BYTES(32) for name in (bytes(NAME_BYTES), BYTES(NAME_BYTES))]
    hello += [BYTES(HELLO_BYTES - 1), BYTES(HELLO_BYTES + 1)]
    after = [MAGIC + part for part in (b"", BYTES(NONCE_BYTES), BYTES(NONCE_BYTES * 3), b"\0" * 4096)]
    texts = [b"", b"\n", b"\0", b"\xff" * 4096, b"{}", b"[" * 5000, b"null", b"QUIT\r\n", b"SSH-2.0-x\r\n"]
    pickles = [pickle.dumps(list(range(50)), protocol) for protocol in range(6)]
    stores = [struct.pack("<BI", command, 5) + b"a key" for command in range(10)]
    random_bytes = [
        BYTES(size)
        for size in (1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 64, 65, 128, 255, 256, 1000, 4095, 4096, 65536, 200_000)
    ]
    return [*http, *tls, *begun, *hello, *after, *texts, *pickles, *stores, *_lying_lengths(), *random_bytes]


NOISE = noise()


@contextmanager
def serving(secret: str) -> Iterator[RendezvousServer]:
    server = RendezvousServer("127.0.0.1", 0, secret)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def rendezvous() -> Iterator[RendezvousServer]:
    with serving(new_secret()) as server:
        yield server


@pytest.mark.parametrize("number", range(len(NOISE)))
def test_noise_gets_no_answer_and_leaves_no_trace(number: int, rendezvous: RendezvousServer) -> None:
    received = b""
    with socket.create_connection(("127.0.0.1", rendezvous.address.port), timeout=20) as stranger, suppress(OSError):
        stranger.sendall(NOISE[number])
        stranger.shutdown(socket.SHUT_WR)
        while (more := stranger.recv(4096)) and len(received) < 1 << 16:
            received += more
    assert len(received) <= len(MAGIC) + NONCE_BYTES + 64, "nothing but a challenge"
    with socket.create_connection(("127.0.0.1", rendezvous.address.port), timeout=20) as other:
        assert other.recv(4).startswith(MAGIC[:1]), "it still answers"


@pytest.mark.long
@pytest.mark.parametrize("way", ["a value of torch's store", "a pickle as a hello"])
def test_the_exploit_of_the_rendezvous_runs_no_code(way: str, tmp_path: Path) -> None:
    """The one that worked once: torch's own rendezvous unpickles what it finds under the key of the job."""
    mark, secret = tmp_path / "executed", new_secret()
    attack = pickle.dumps(Payload(mark))
    pickle.loads(attack)
    assert mark.exists(), "it works where somebody unpickles it"
    mark.rmdir()
    with serving(secret) as server:
        if way == "a pickle as a hello":
            with (
                socket.create_connection(("127.0.0.1", server.address.port), timeout=20) as stranger,
                suppress(OSError),
            ):
                stranger.sendall(attack)
        else:
            with suppress(RuntimeError):  # it speaks another protocol
                store = TCPStore("127.0.0.1", server.address.port, is_master=False, timeout=timedelta(seconds=2))
                store.set("torch.rendezvous.job", attack)
        environment = {**os.environ, JOB_SECRET_VARIABLE: secret}
        words = f"launch --nnodes 1:2 --rdzv-endpoint {server.endpoint} -- python -c 1".split()
        done = subprocess.run(
            [sys.executable, "-m", "zero2all.cli", *words], env=environment, capture_output=True, text=True, timeout=200
        )
    assert done.returncode == 0, done.stderr
    assert not mark.exists()


HOSTS: dict[str, tuple[list[bytes], bool]] = {
    "the address": ([b"127.0.0.1:8000"], True),
    "the name": ([b"localhost:8000"], True),
    "IPv6": ([b"[::1]:8000"], True),
    "without a port": ([b"LOCALHOST"], True),
    "another name": ([b"evil.example:8000"], False),
    "a name that begins so": ([b"127.0.0.1.evil.example"], False),
    "a name that ends so": ([b"evil.localhost"], False),
    "another address": ([b"10.0.0.5:8000"], False),
    "zero": ([b"0.0.0.0:8000"], False),
    "a user": ([b"localhost@evil.example"], False),
    "nothing": ([b""], False),
    "no header": ([], False),
    "two": ([b"localhost", b"evil.example"], False),
    "invalid bytes": ([b"\xff\xfe"], False),
}


@pytest.mark.parametrize("name", HOSTS)
def test_only_names_of_this_machine_are_answered(name: str) -> None:
    values, allowed = HOSTS[name]
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append({"status": 200})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": [(b"host", value) for value in values], "method": "GET", "path": "/"}
    asyncio.run(LoopbackHosts(app)(scope, receive, send))
    assert (sent[0]["status"] == 200) == allowed
    assert allowed or sent[0]["status"] == 421


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run = tmp_path_factory.mktemp("watched") / "run"
    run.mkdir()
    (run / "record.jsonl").write_text('{"event":"start","step":0,"steps":9,"time":0}\n{"step":0,"time":1,"loss":5}\n')
    with watching(run.parent, "--port", "0") as (url, _):
        yield url


@pytest.mark.slow
def test_many_open_pages_do_not_keep_others_waiting(page: str) -> None:
    """Of unfinished requests, see tests/track/test_flood.py."""
    base, key = page.split("/?key=")
    host, port = base.removeprefix("http://").split(":")
    with ExitStack() as stack:
        for _ in range(200):
            client = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            client.sendall(f"GET /api/stream?key={key} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        begun = time.monotonic()
        answer = httpx.get(f"{base}/api/runs", params={"key": key}, trust_env=False, timeout=60)
        assert answer.status_code == 200
        assert time.monotonic() - begun < 20


@contextmanager
def foreign_site(html: str) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join(30)


ATTACK = Path(__file__).with_name("foreign_page.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_page_from_elsewhere_reads_nothing_even_with_the_key(page: str, tmp_path: Path) -> None:
    """In a real browser, which resolves the attacker's name to this machine: DNS rebinding."""
    base, key = page.split("/?key=")
    port = base.rpartition(":")[2]
    script = ATTACK.replace("TARGET", base).replace("KEY", key).replace("PORT", port)
    with foreign_site(script) as own, browser(tmp_path, flags=["--host-resolver-rules=MAP * 127.0.0.1"]) as opened:
        opened.get(f"http://attacker.example:{own}/")
        until = time.monotonic() + 60
        while not (results := opened.execute_script("return window.results")).get("done"):
            assert time.monotonic() < until
            time.sleep(0.1)
        assert {results[name] for name in ("cross-origin", "rebound", "rebound page")} == {"refused"}, results
        assert results.get("frame", "refused") == "refused"
        opened.get(f"http://rebound.example:{port}/?key={key}")  # now of the same origin as the attacker's page
        shown = opened.execute_script("return document.body.textContent")
        assert "answers to 127.0.0.1 and localhost only" in shown
        assert "<script" not in opened.page_source
        opened.get(f"{base}/?key={key}")
        assert opened.execute_script("return document.querySelectorAll('script').length") > 0, "the page itself works"


ADDRESSES: dict[str, str] = {
    "an option as the host": "ssh://-oProxyCommand=touch/x",
    "an option as the user": "ssh://-oProxyCommand=touch@host/x",
    "an option after the user": "ssh://user@-oProxyCommand=x/y",
    "a short option": "ssh://-l@host/x",
    "a host of spaces": "ssh://ho st/x",
    "a host with a line end": "ssh://host%0a/x",
    "a path with a line end": "ssh://host/a%0ab",
    "a path with NUL": "ssh://host/a%00b",
    "a port of letters": "ssh://host:port/x",
    "a port too large": "ssh://host:99999/x",
    "a negative port": "ssh://host:-1/x",
    "no path": "ssh://host",
    "an empty path": "ssh://host/",
    "no host": "ssh:///x",
    "only a user": "ssh://user@/x",
    "a host of shell characters": "ssh://$(touch x)/y",
    "a host of quotes": "ssh://'host'/x",
    "a host of a pipe": "ssh://a|b/x",
    "an open bracket": "ssh://[::1/x",
    "a host of escapes": "ssh://\x1b[31mhost/x",
}


@pytest.mark.parametrize("name", ADDRESSES)
def test_a_hostile_address_becomes_no_option_and_no_command(name: str) -> None:
    try:
        address, path = parse_address(ADDRESSES[name])
    except UsageError:
        return
    words = address.ssh_arguments
    assert words[-2] == "--", "what follows is a host, not an option"
    assert not words[-1].startswith("-")
    assert not any(character in words[-1] + path for character in "\n\0")
