"""Connections of the pages' servers: none that a client leaves unfinished keeps others out.

uvicorn waits for ever for the rest of a request, and stops accepting without descriptors.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from zero2all.processes import raise_descriptor_limit

HEAD_SECONDS = 5.0  # for the head of a request
BODY_SECONDS = 30.0  # for its body, from its head on
WRITE_SECONDS = 30.0  # for a client that does not read
MAX_CONNECTIONS = 4096


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
        """Those whose client has to send more, the oldest first."""

    def make(self, *args: Any, **options: Any) -> LimitedConnection:
        """As ``uvicorn.Config(http=...)`` wants it."""
        return LimitedConnection(self, *args, **options)


class LimitedConnection(H11Protocol):
    """Closed when its client takes too long, or by a newer one while its request is unfinished."""

    def __init__(self, limits: ConnectionLimits, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._head_cycle: object = None  # the request whose body is awaited

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
        cycle = self.cycle
        if self.transport.is_closing():
            return
        if cycle is None or cycle.response_complete:  # not the whole head yet
            if self not in self._limits.unfinished:
                self._await_client(HEAD_SECONDS)
        elif not cycle.more_body:
            self._finish()
        elif cycle is not self._head_cycle:
            self._head_cycle = cycle
            self._await_client(BODY_SECONDS)

    def on_response_complete(self) -> None:
        self._finish()  # also if the body was not read to its end; uvicorn closes idle connections itself
        super().on_response_complete()

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
