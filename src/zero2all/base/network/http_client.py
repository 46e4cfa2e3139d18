"""The HTTP client of all requests: with deadlines, limits, retries, and a check of where redirects lead.

Built on httpx2, which also sends the requests of ``huggingface_hub``. Added here is what a hostile server could do
without it: headers and bodies that never end, redirects into a private network or out of encryption, secrets in errors.
"""

from __future__ import annotations

import ipaddress
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cache, partial
from typing import Any, TypeVar
from urllib.parse import SplitResult, urljoin, urlsplit

import httpx2

from zero2all import __version__
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.redact import redact
from zero2all.base.units import show_seconds

MAX_REDIRECTS = 10
MAX_REPLY_BYTES = 64 << 20  # of a response that is kept in memory
MIN_RATE = 1024  # bytes per second; a slower connection counts as stalled
MAX_FAILURES = 6  # in a row, without progress
FIRST_WAIT = 0.5  # seconds, doubled after each failure
MAX_WAIT = 30.0
MAX_RETRY_AFTER = 300.0  # seconds that a server may ask for
_DEFAULT_PORTS = {"http": 80, "https": 443}
_ADVICE = {
    401: "it needs a login: set HF_TOKEN for the Hub, or write user:password@ into the URL",
    403: "the server denies access; if it is gated on the Hub, accept its terms there and set HF_TOKEN",
    404: "there is no such file",
    410: "the file was removed",
}
Result = TypeVar("Result")


class HttpError(Z2aError):
    """A request that failed and that trying again does not save."""

    status: int | None = None
    """The HTTP status, if that is the reason."""


class UnansweredError(HttpError):
    """The server gave no answer after all retries."""


class TransientError(Exception):
    """A request that failed and may succeed the next time."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Stopped(Exception):
    """The command was interrupted, or failed in another thread."""


class HttpClient(httpx2.Client):
    """Threads can share it. Raises only HttpError and TransientError, also while a body is read."""

    def __init__(
        self,
        timeout: float,
        *,
        endpoint: str | None = None,
        token: str | None = None,
        body_limit: int | None = None,
        trust_env: bool = True,
        on_response: Callable[[httpx2.Response], None] | None = None,
    ) -> None:
        """``timeout``: seconds for a connection, for all headers, for some data. ``token`` goes to ``endpoint`` only.

        ``body_limit``: bytes of a body; None for no limit. ``trust_env``: use the proxies of the environment.
        """
        hooks = [self._watch_response, *([on_response] if on_response else [])]
        self._token = (httpx2.URL(endpoint).origin, token) if endpoint and token else None
        self._seconds, self._body_limit = timeout, body_limit
        try:
            super().__init__(
                verify=_ssl_context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")),
                headers={"User-Agent": f"zero2all/{__version__}", "Accept-Encoding": "identity"},
                timeout=timeout,
                follow_redirects=True,
                max_redirects=MAX_REDIRECTS,
                # A connection that is kept would get past the check of its address.
                limits=httpx2.Limits(max_keepalive_connections=0),
                event_hooks={"request": [self._watch_request], "response": hooks},
                trust_env=trust_env,
            )
        except (ImportError, ValueError) as error:
            raise UsageError(f"a proxy of the environment cannot be used ({redact(str(error))[:200]})") from error

    def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request. After redirects a GET has a status below 300, or 416 for a range that the file does not have.

        Redirects of a POST are not followed: they would take its body, or a secret in its URL, to other hosts.
        """
        if self._token is not None and request.url.origin == self._token[0]:
            request.headers["Authorization"] = f"Bearer {self._token[1]}"
        is_get = request.method == "GET"
        with _own_errors(request.url):
            response = super().send(request, **options | ({} if is_get else {"follow_redirects": False}))
        if is_get:
            _check_status(request.url, response)
        return response

    def open(self, url: str, headers: dict[str, str] | None = None) -> httpx2.Response:
        """A response whose body is not read yet. Use it in a ``with closing``."""
        return self.send(self.build_request("GET", url, headers=headers), stream=True)

    def _watch_request(self, request: httpx2.Request) -> None:
        hops = request.extensions.setdefault("zero2all", _Hops(self._seconds))
        request.extensions["timeout"] = httpx2.Timeout(self._seconds).as_dict()
        request.extensions["trace"] = partial(hops.trace, request.url)

    def _watch_response(self, response: httpx2.Response) -> None:
        is_redirect = response.has_redirect_location
        if is_redirect:
            _check_redirect(str(response.request.url), response.headers["Location"])
        is_post, stream = response.request.method == "POST", response.stream
        limit = MAX_REPLY_BYTES if is_redirect or is_post else self._body_limit
        assert isinstance(stream, httpx2.SyncByteStream)
        response.stream = _WatchedBody(stream, response.request.url, self._seconds, limit, must_end=is_post)
        response.headers.pop("Content-Encoding", None)  # not asked for, and a few bytes could expand to many


@cache
def shared_client(timeout: float, *, trust_env: bool = True) -> HttpClient:
    """A client for occasional requests, which need not load the certificates each time."""
    return HttpClient(timeout, trust_env=trust_env)


@cache
def _ssl_context(cert_file: str | None, cert_directory: str | None) -> ssl.SSLContext:
    """OpenSSL reads both variables itself. They are arguments because loading certificates takes a while."""
    return ssl.create_default_context()


@dataclass
class Backoff:
    """Waits longer after each failure in a row, and gives up after a few."""

    name: str
    stop: threading.Event = field(default_factory=threading.Event)
    failures: int = 0

    def wait(self, error: TransientError, *, has_progressed: bool = False) -> None:
        """``has_progressed``: the attempt brought something, so that the next one can start at once."""
        self.failures = 0 if has_progressed else self.failures + 1
        if self.failures >= MAX_FAILURES:
            raise UnansweredError(f"{self.name}: {error}, {MAX_FAILURES} times in a row") from error
        seconds = error.retry_after
        if seconds is None:
            seconds = 0.0 if has_progressed else min(MAX_WAIT, FIRST_WAIT * 2 ** (self.failures - 1))
            seconds *= random.uniform(0.5, 1)  # threads that failed together do not return together
        if seconds > MAX_RETRY_AFTER:
            raise UnansweredError(f"{self.name}: {error}; the server asks to wait {show_seconds(seconds)}") from error
        if self.stop.wait(seconds):
            raise Stopped

    def retry(self, attempt: Callable[[], Result]) -> Result:
        while True:
            try:
                return attempt()
            except TransientError as error:
                self.wait(error)


def split_url(url: str) -> SplitResult:
    """The parts of a URL of the web; anything else is an error."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in _DEFAULT_PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UsageError(f"{redact(url)[:200]!r} is not an http:// or https:// URL")
    return parts


def is_transient(status: int) -> bool:
    return status in (408, 425, 429) or status >= 500


def is_private_address(address: str) -> bool:
    """Whether an IP address belongs to this machine or to a private network, such as a metadata service of a cloud."""
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return not parsed.is_global


def timestamp(text: str) -> float | None:
    """Seconds since 1970, of a date in a header."""
    try:
        return parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


class _Hops:
    """A request and its redirects. They lead to private addresses only if the URL that the user named has one, too.

    The address of the connection is checked: a name that resolves to something else the next time does not help.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout, self._is_proxied = timeout, False
        self._may_be_private: bool | None = None
        self._stream: Any = None
        self._timer: threading.Timer | None = None

    def trace(self, url: httpx2.URL, name: str, info: dict[str, Any]) -> None:
        """Called by httpx2 before and after each phase. What it raises ends the request."""
        match name.partition(".")[2]:
            case "connect_tcp.started":
                target = (url.raw_host.decode(), url.port or _DEFAULT_PORTS[url.scheme])
                self._is_proxied = (info["host"], info["port"]) != target
                if self._is_proxied:
                    self.check_name(url.host)
            case "connect_tcp.complete":
                self._stream = info["return_value"]
                if not self._is_proxied:
                    self._check_connection(url)
            case "start_tls.complete":
                self._stream = info["return_value"]
            case "receive_response_headers.started":
                # A timeout is for one read: a byte now and then, or one interim response after the other, goes on.
                self._timer = threading.Timer(self._timeout, self._cut)
                self._timer.daemon = True
                self._timer.start()
            case "receive_response_headers.complete" | "receive_response_headers.failed" if self._timer is not None:
                self._timer.cancel()

    def check(self, address: str, host: str) -> None:
        is_private = is_private_address(address)
        if self._may_be_private is None:
            self._may_be_private = is_private
        elif is_private and not self._may_be_private:
            raise HttpError(
                f"redirected to {host}, which is {address}, an address of this machine or of a private network: if "
                "that is right, name the URL there yourself"
            )

    def check_name(self, host: str) -> None:
        """The same by name alone: a proxy connects, and looks names up itself."""
        name = host.rstrip(".").lower()
        address = "127.0.0.1" if name == "localhost" or name.endswith(".localhost") else name
        try:
            ipaddress.ip_address(address)
        except ValueError:
            self._may_be_private = bool(self._may_be_private)
        else:
            self.check(address, host)

    def _check_connection(self, url: httpx2.URL) -> None:
        try:
            self.check(self._stream.get_extra_info("server_addr")[0], url.host)
        except HttpError:
            self._stream.close()
            raise

    def _cut(self) -> None:
        with suppress(OSError):
            self._stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


class _WatchedBody(httpx2.SyncByteStream):
    """A body that neither stalls nor exceeds a limit."""

    def __init__(
        self, inner: httpx2.SyncByteStream, url: httpx2.URL, timeout: float, limit: int | None, *, must_end: bool
    ) -> None:
        """``must_end``: all of it has to arrive within the timeout, not just some data."""
        self._inner, self._url, self._timeout, self._limit, self._must_end = inner, url, timeout, limit, must_end

    def __iter__(self) -> Iterator[bytes]:
        with _own_errors(self._url):
            yield from self._blocks()

    def close(self) -> None:
        self._inner.close()

    def _blocks(self) -> Iterator[bytes]:
        total, seconds, received, began = 0, 0.0, 0, time.monotonic()
        for block in self._inner:
            total += len(block)
            if self._limit is not None and total > self._limit:
                raise HttpError(f"{_shown(self._url)}: the answer is longer than {self._limit} bytes")
            seconds, received = seconds + time.monotonic() - began, received + len(block)
            if seconds >= self._timeout:
                if self._must_end or received < MIN_RATE * seconds:
                    raise TransientError(f"the answer is too slow ({received} bytes in {seconds:.1f} s)")
                seconds, received = 0.0, 0
            yield block
            began = time.monotonic()  # time that the caller takes to write does not count


@contextmanager
def _own_errors(url: httpx2.URL) -> Iterator[None]:
    try:
        yield
    except httpx2.TooManyRedirects as error:
        raise HttpError(f"{_shown(url)}: more than {MAX_REDIRECTS} redirects") from error
    except httpx2.TransportError as error:
        for cause in _causes(error):
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise HttpError(
                    f"the certificate of {url.host} is not trusted ({cause.verify_message}); if it is your own server "
                    "or proxy, name its certificate in SSL_CERT_FILE"
                ) from error
        what = (
            "no connection to" if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout) else "no answer from"
        )
        raise TransientError(f"{what} {url.host} ({_reason(error)})") from error
    except (httpx2.InvalidURL, ValueError) as error:  # its text may quote a header
        raise HttpError(f"{_shown(url)}: no valid HTTP ({type(error).__name__})") from error


def _reason(error: httpx2.TransportError) -> str:
    if isinstance(error, httpx2.TimeoutException):
        return "timed out"
    is_of_system = isinstance(error, httpx2.NetworkError) and str(error)
    return str(error) if is_of_system else type(error).__name__  # the text of a protocol error may quote a header


def _causes(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _check_status(url: httpx2.URL, response: httpx2.Response) -> None:
    status = response.status_code
    if 200 <= status < 300 or status == 416:
        return
    response.close()
    if is_transient(status):
        raise TransientError(f"status {status} from {response.url.host}", retry_after(response))
    error = HttpError(f"{_shown(url)}: status {status}{': ' + _ADVICE[status] if status in _ADVICE else ''}")
    error.status = status
    raise error


def _check_redirect(current: str, location: str) -> None:
    try:
        target = split_url(urljoin(current, location))
    except (UsageError, ValueError):
        shown = f"redirected to {redact(location)[:200]!r}, which is not http:// or https://"
        raise HttpError(f"{redact(current)}: {shown}") from None
    if current.startswith("https:") and target.scheme != "https":
        raise HttpError(f"{redact(current)}: redirected from https:// to http://, which anybody in between can change")


def retry_after(response: httpx2.Response) -> float | None:
    """Seconds that the server asks to wait, given as such or as a date."""
    text = response.headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit() and len(text) < 18:
        return float(text)
    until = timestamp(text)
    return None if until is None else max(0.0, until - time.time())


def _shown(url: httpx2.URL) -> str:
    return redact(str(url))
