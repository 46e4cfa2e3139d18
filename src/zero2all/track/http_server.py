"""What the HTTP servers of ``z2a watch`` and ``z2a serve`` share: their key, headers, connections and start.

No connection that a client leaves unfinished keeps others out: uvicorn waits for ever for the rest of a request, and
stops accepting without descriptors.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.processes import raise_descriptor_limit

MIN_KEY_LENGTH = 16  # characters
_KEY_PATTERN = re.compile(r"[A-Za-z0-9._~-]+")  # what needs no escaping in an address or a header
HEAD_SECONDS = 5.0  # for the head of a request
BODY_SECONDS = 30.0  # for its body, from its head on
WRITE_SECONDS = 30.0  # for a client that does not read
MAX_CONNECTIONS = 4096
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


def new_key() -> str:
    return secrets.token_urlsafe(16)


def load_key(path: Path) -> str:
    """The key in a file, which is made with a new key if there is none."""
    try:
        _write_new(path)
        if path.stat().st_mode & 0o007:
            raise UsageError(f"{path} can be read by every user of this machine: chmod 600 {path}")
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be used for the key ({error}): give another file with --key-file") from None
    if len(key) < MIN_KEY_LENGTH or not _KEY_PATTERN.fullmatch(key):
        raise UsageError(
            f"the key in {path} must have at least {MIN_KEY_LENGTH} characters, all of them letters, digits or -._~: "
            "delete the file to get a new one"
        )
    return key


def _write_new(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with open(descriptor, "w", encoding="ascii") as stream:
        stream.write(f"{new_key()}\n")


def bearer_token(request: Request) -> str:
    """The key in the header ``Authorization: Bearer KEY``, or nothing."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


class QuietDisconnects:
    """A client that goes away inside its request is no error of the server: no traceback in its log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await self._app(scope, receive, send)


class ConnectionLimits:
    """What the connections of one server share."""

    def __init__(self) -> None:
        self.most = min(MAX_CONNECTIONS, raise_descriptor_limit() // 2)  # the other half is for files and pipes
        self.count = 0
        self.unfinished: dict[LimitedConnection, None] = {}
        """Connections whose client has to send more, or is idle after an answer, the oldest first."""

    def make(self, *args: Any, **options: Any) -> LimitedConnection:
        """The protocol factory for ``uvicorn.Config(http=...)``."""
        return LimitedConnection(self, *args, **options)


class LimitedConnection(H11Protocol):
    """Closed when its client takes too long, or by a newer one while its request is unfinished."""

    def __init__(self, limits: ConnectionLimits, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._head_cycle: object = None  # the request whose body is awaited
        self._is_idle = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limits.count += 1
        self._await_client(HEAD_SECONDS)
        if self._limits.count > self._limits.most:
            next(iter(self._limits.unfinished))._drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.count -= 1
        self._finish()
        self.resume_writing_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_client()
        self._is_idle = False

    def on_response_complete(self) -> None:
        self._finish()  # also if the body was not read to its end
        super().on_response_complete()  # which handles a request that has arrived meanwhile
        self._watch_client()
        self._is_idle = True

    def _watch_client(self) -> None:
        cycle = self.cycle
        if self.transport.is_closing():
            return
        if cycle is None or cycle.response_complete:  # not the whole head yet
            if self._is_idle or self not in self._limits.unfinished:
                self._await_client(HEAD_SECONDS)
        elif not cycle.more_body:
            self._finish()
        elif cycle is not self._head_cycle:
            self._head_cycle = cycle
            self._await_client(BODY_SECONDS)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self._write_timer or self.loop.call_later(WRITE_SECONDS, self._drop)

    def resume_writing(self) -> None:
        self.resume_writing_timer()
        super().resume_writing()

    def resume_writing_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _await_client(self, seconds: float) -> None:
        self._finish()
        self._limits.unfinished[self] = None
        self._read_timer = self.loop.call_later(seconds, self._drop)

    def _finish(self) -> None:
        self._limits.unfinished.pop(self, None)
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _drop(self) -> None:
        self._finish()
        self.transport.abort()


class LoopbackHosts:
    """Answers only requests that call this machine by a name of its own.

    By DNS rebinding, a page from elsewhere can make its own name resolve to 127.0.0.1, and the browser then takes what
    we serve for its own; but it still sends that name.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not self._is_allowed(scope):
            refusal = Response("this server answers to 127.0.0.1 and localhost only", status_code=421, headers=HEADERS)
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        return len(given) == 1 and re.sub(r":\d{1,5}$", "", given[0]).strip("[]").lower() in LOOPBACK_HOSTS


def serve(app: Starlette, host: str, port: int, ready: Callable[[int], None]) -> None:
    """Serve until Ctrl-C. Calls ``ready`` with the port as soon as the page can be opened."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise Z2aError(f"cannot listen on {host}:{port} ({error}); choose another --port") from error
        listener.listen()
        server = uvicorn.Server(server_config(LoopbackHosts(app) if host in LOOPBACK_HOSTS else app))
        with server.capture_signals():  # asyncio loses a Ctrl-C that arrives while it installs its own handler
            ready(listener.getsockname()[1])
            server.run([listener])


def server_config(app: ASGIApp) -> uvicorn.Config:
    """The configuration of ``z2a watch`` and ``z2a serve``."""
    connection: Any = ConnectionLimits().make
    return uvicorn.Config(
        QuietDisconnects(app),
        http=connection,
        ws="none",
        backlog=128,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
    )
