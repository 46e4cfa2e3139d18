"""Connections for urllib with what it lacks: a deadline for headers, and a check of where a redirect leads.

A timeout of a socket is for one read: a server that sends a byte now and then, or one interim response after the other,
holds a connection for ever.
"""

from __future__ import annotations

import http.client
import io
import ipaddress
import socket
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any

MAX_HEADER_BYTES = 256 << 10  # before the body, with all interim responses


class HeaderError(OSError):
    """Headers that do not end."""


class PrivateAddressError(Exception):
    """A redirect to an address that is not on the internet."""


def is_private_address(address: str) -> bool:
    """Whether an IP address belongs to this machine or to a private network, such as one of a cloud's own services."""
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return not parsed.is_global


class RedirectGuard:
    """Redirects lead to private addresses only if the URL that the user named has one, too.

    The address is that of the connection: a name that resolves to something else at the next look does not help.
    """

    def __init__(self, may_be_private: bool | None = None) -> None:
        self.may_be_private = may_be_private
        """None: nothing is connected yet."""

    def check(self, address: str) -> None:
        is_private = is_private_address(address)
        if self.may_be_private is None:
            self.may_be_private = is_private
        elif is_private and not self.may_be_private:
            raise PrivateAddressError(address)

    def check_name(self, host: str) -> None:
        """The same by name alone: a proxy connects, and looks names up itself."""
        name = host.rstrip(".").lower()
        address = "127.0.0.1" if name == "localhost" or name.endswith(".localhost") else name
        try:
            ipaddress.ip_address(address)
        except ValueError:
            self.may_be_private = bool(self.may_be_private)
        else:
            self.check(address)


class _HeaderStream(io.RawIOBase):
    """A socket that is read as a file, within a time and a size until the headers have ended."""

    def __init__(self, inner: io.RawIOBase, connection: socket.socket) -> None:
        self._inner, self._connection = inner, connection
        self._timeout = connection.gettimeout()
        self._deadline = None if self._timeout is None else time.monotonic() + self._timeout
        self._left = MAX_HEADER_BYTES
        self._in_headers = True

    def end_headers(self) -> None:
        self._in_headers = False
        self._connection.settimeout(self._timeout)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._in_headers:
            self._check()
        count: int | None = self._inner.readinto(buffer)
        self._left -= count or 0
        return count

    def _check(self) -> None:
        if self._left <= 0:
            raise HeaderError(f"more than {MAX_HEADER_BYTES >> 10} KiB of headers")
        if self._deadline is not None:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                raise HeaderError(f"headers without end in {self._timeout:g} s")
            self._connection.settimeout(remaining)

    def close(self) -> None:
        self._inner.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self._stream = _HeaderStream(self.fp.detach(), sock)
        self.fp = io.BufferedReader(self._stream)

    def begin(self) -> None:
        super().begin()
        self._stream.end_headers()


class _Connection(http.client.HTTPConnection):
    response_class = _Response
    on_connect: Callable[[str], None]
    """Gets the address of the other side before anything is sent."""

    def connect(self) -> None:
        super().connect()
        try:
            self.on_connect(self.sock.getpeername()[0])
        except PrivateAddressError:
            self.close()
            raise


class _SecureConnection(http.client.HTTPSConnection, _Connection):
    """Before the handshake it connects as its second base does."""


def _connection(
    kind: type[_Connection], on_connect: Callable[[str], None], host: str, /, **options: Any
) -> http.client.HTTPConnection:
    connection = kind(host, **options)
    connection.on_connect = on_connect
    return connection


class _HttpHandler(urllib.request.HTTPHandler):
    def __init__(self, on_connect: Callable[[str], None]) -> None:
        super().__init__()
        self._connect = partial(_connection, _Connection, on_connect)

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connect, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def __init__(self, on_connect: Callable[[str], None]) -> None:
        super().__init__()
        self._connect = partial(_connection, _SecureConnection, on_connect)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connect, req)


def web_opener(scheme: str, host: str, guard: RedirectGuard) -> urllib.request.OpenerDirector:
    """An opener with no handler for other schemes, redirects and error statuses."""
    on_connect = guard.check
    if scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        guard.check_name(host)
        on_connect = _ignore
    opener = urllib.request.OpenerDirector()
    for handler in (urllib.request.ProxyHandler(), _HttpHandler(on_connect), _HttpsHandler(on_connect)):
        opener.add_handler(handler)
    return opener


def _ignore(address: str) -> None:
    """The address of a proxy, which the user chose."""
