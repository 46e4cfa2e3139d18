"""A web server and a Hub on the loopback interface, which misbehave as told."""

from __future__ import annotations

import hashlib
import json
import random
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

BLOCK = 1 << 18


class Readable:
    size: int

    def read(self, start: int, stop: int) -> bytes:
        raise NotImplementedError

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for start in range(0, self.size, BLOCK):
            digest.update(self.read(start, start + BLOCK))
        return digest.hexdigest()

    def git_blob(self) -> str:
        return hashlib.sha1(f"blob {self.size}\0".encode() + self.read(0, self.size)).hexdigest()


@dataclass(frozen=True)
class Content(Readable):
    """Bytes of any length, made when they are read."""

    size: int
    seed: int = 0

    def read(self, start: int, stop: int) -> bytes:
        stop = min(stop, self.size)
        first = start // BLOCK
        blocks = b"".join(self._block(number) for number in range(first, -(-stop // BLOCK)))
        return blocks[start - first * BLOCK : stop - first * BLOCK]

    def _block(self, number: int) -> bytes:
        """No two blocks are equal: each begins with its number and is rotated by another amount."""
        noise, turn = _noise(self.seed), number * 7919 % BLOCK
        return struct.pack("<Q", number) + (noise[turn:] + noise[:turn])[8:]


@cache
def _noise(seed: int) -> bytes:
    return random.Random(seed).randbytes(BLOCK)


@dataclass(frozen=True)
class Text(Readable):
    """Content that is given."""

    data: bytes

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.data)

    def read(self, start: int, stop: int) -> bytes:
        return self.data[start:stop]


@dataclass
class Page:
    """A file, and how the server misbehaves with it."""

    content: Readable
    etag: str | None = '"v1"'
    ranges: bool = True
    cut_after: int | None = None
    """Bytes of a body after which the connection is closed."""
    cuts: int = 1 << 30
    """How many connections are cut."""
    reset: bool = False
    """Cut connections are reset instead of closed."""
    length: int | None = None
    """A wrong Content-Length, also in Content-Range."""
    shift: int = 0
    """A wrong position in Content-Range."""
    first: list[tuple[int, dict[str, str]] | None] = field(default_factory=list)
    """Statuses and headers of the first answers; None for one that is as usual."""
    always: tuple[int, dict[str, str]] | None = None
    chunked: bool = False
    endless: bool = False
    hold_after: int | None = None
    """Bytes of a body after which nothing comes until ``release`` is set."""
    trickle: bool = False
    """Later bytes come one by one."""
    release: threading.Event = field(default_factory=threading.Event)
    sent: int = 0


@dataclass(frozen=True)
class SeenRequest:
    path: str
    headers: dict[str, str]


class Server:
    def __init__(self, certificate: Path | None = None) -> None:
        self.pages: dict[str, Page] = {}
        self.seen: list[SeenRequest] = []
        self.lock = threading.Lock()
        self._inner = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._inner.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._inner.server_address[1]}"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._inner.socket = context.wrap_socket(self._inner.socket, server_side=True)
            self.url = self.url.replace("http:", "https:")
        self._thread = threading.Thread(target=self._inner.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def add(self, path: str, page: Page) -> str:
        self.pages[path] = page
        return f"{self.url}{path}"

    def answer(self, request: _Request) -> None:
        page = self.pages.get(unquote(urlsplit(request.path).path))
        if page is None:
            request.plain(404, {})
        else:
            send_page(request, page)

    def requests(self, path: str) -> list[SeenRequest]:
        return [one for one in self.seen if urlsplit(one.path).path == path]

    def close(self) -> None:
        for page in self.pages.values():
            page.release.set()
        self._inner.shutdown()
        self._inner.server_close()


@contextmanager
def serving(server: Server) -> Iterator[Any]:
    try:
        yield server
    finally:
        server.close()


class _Request(BaseHTTPRequestHandler):
    """What handlers of this file use."""

    protocol_version = "HTTP/1.1"

    def plain(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _handler(server: Server) -> type[_Request]:
    class Handler(_Request):
        def do_GET(self) -> None:
            with server.lock:
                server.seen.append(SeenRequest(self.path, dict(self.headers.items())))
            self.close_connection = True
            with suppress(OSError):  # the client has gone
                server.answer(self)

    return Handler


def send_page(request: _Request, page: Page) -> None:
    unusual = page.always or (page.first.pop(0) if page.first else None)
    if unusual is not None:
        request.plain(*unusual)
        return
    size = page.content.size
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
    if asked and page.ranges:
        start, stop = int(asked[1]), min(int(asked[2] or size) + 1, size)
        if start >= size:
            request.plain(416, {"Content-Range": f"bytes */{size}"})
            return
        request.send_response(206)
        total = size if page.length is None else page.length
        request.send_header("Content-Range", f"bytes {start + page.shift}-{stop - 1 + page.shift}/{total}")
    else:
        start, stop = 0, size
        request.send_response(200)
    if page.etag is not None:
        request.send_header("ETag", page.etag)
    if page.chunked or page.endless:
        request.send_header("Transfer-Encoding", "chunked")
    else:
        request.send_header("Content-Length", str(stop - start if page.length is None else page.length))
    request.end_headers()
    _send_body(request, page, start, stop)


def _send_body(request: _Request, page: Page, start: int, stop: int) -> None:
    position, limit = start, stop
    if page.cut_after is not None and page.cuts > 0 and stop - start > page.cut_after:
        page.cuts -= 1
        limit = start + page.cut_after
    if page.hold_after is not None:
        limit = min(limit, start + page.hold_after)
    while position < limit:
        block = page.content.read(position, min(position + BLOCK, limit))
        _write(request, page, block)
        position += len(block)
    if page.hold_after is not None and position < stop:
        while page.trickle and not page.release.is_set():
            request.wfile.write(b"x")
            time.sleep(0.02)
        page.release.wait(60)
    while page.endless:
        _write(request, page, bytes(BLOCK))
    if page.chunked and position == stop:
        request.wfile.write(b"0\r\n\r\n")
    if page.reset and position < stop:
        request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.connection.close()


def _write(request: _Request, page: Page, block: bytes) -> None:
    if page.chunked or page.endless:
        block = f"{len(block):x}\r\n".encode() + block + b"\r\n"
    request.wfile.write(block)
    page.sent += len(block)


class FakeHub(Server):
    """The API of the Hub for one repository. Large files are on another server, whose URLs are valid once or longer."""

    COMMIT = "c0ffee" + "0" * 34

    def __init__(self, store: Server, place: str, token: str | None = None) -> None:
        super().__init__()
        self.store, self.place, self.token = store, place, token
        self.tree: list[dict[str, Any]] = []
        self.page_size = 2
        self.next_host = self.url
        self.answers: dict[str, bytes] = {}
        """Bodies in place of those of the API, by path."""
        self.prefix = place if place.startswith("datasets/") else place.removeprefix("models/")

    def add_file(self, path: str, content: Readable, lfs: bool = True, **changes: Any) -> Page:
        entry: dict[str, Any] = {"type": "file", "path": path, "size": content.size, "oid": content.git_blob()}
        if lfs:
            entry["lfs"] = {"oid": content.sha256(), "size": content.size, "pointerSize": 134}
        self.tree.append(entry | changes)
        page = Page(content)
        (self.store if lfs else self).pages[f"/{path}" if lfs else self._resolve(path)] = page
        return page

    def answer(self, request: _Request) -> None:
        parts = urlsplit(request.path)
        path = unquote(parts.path)
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            request.plain(401, {})
        elif path in self.answers:
            request.plain(200, {}, self.answers[path])
        elif path.startswith(f"/api/{self.place}/revision/"):
            request.plain(200, {}, json.dumps({"sha": self.COMMIT, "id": self.place}).encode())
        elif path == f"/api/{self.place}/tree/{self.COMMIT}":
            self._send_tree(request, parse_qs(parts.query))
        elif path in self.pages:
            send_page(request, self.pages[path])
        elif path.startswith(self._resolve("")):
            name = quote(path.removeprefix(self._resolve("")))
            request.plain(302, {"Location": f"{self.store.url}/{name}?signature=abc"})
        else:
            request.plain(404, {})

    def _resolve(self, path: str) -> str:
        return f"/{self.prefix}/resolve/{self.COMMIT}/{path}"

    def _send_tree(self, request: _Request, query: dict[str, list[str]]) -> None:
        assert query["recursive"] == ["true"]
        start = int(query.get("cursor", ["0"])[0])
        stop = start + self.page_size
        link = f'<{self.next_host}/api/{self.place}/tree/{self.COMMIT}?recursive=true&cursor={stop}>; rel="next"'
        request.plain(200, {"Link": link} if stop < len(self.tree) else {}, json.dumps(self.tree[start:stop]).encode())
