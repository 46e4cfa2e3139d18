"""GET requests with bounded redirects. Credentials go only to the origin that they are for.

Built on urllib, which honours the proxy variables of the environment and opens a connection for each request. Its own
redirects are not used: they would send credentials along, and follow ``ftp://`` and links into private networks.
"""

from __future__ import annotations

import base64
import http.client
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from types import TracebackType
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from zero2all import __version__
from zero2all.corpus.fetch.connections import PrivateAddressError, RedirectGuard, web_opener
from zero2all.errors import UsageError, Z2aError

MAX_REDIRECTS = 10
REDIRECT_STATUSES = (301, 302, 303, 307, 308)
TRANSIENT_STATUSES = (408, 425, 429)  # and those of 500 and above
MIN_RATE = 1024  # bytes a second; a slower connection counts as stalled
MIN_AGE = 60.0  # seconds; a file that was changed just now may be changed again within the same second
_KEPT_CHARACTERS = "%/:=&?~#+!$,;'@()*[]"  # of a URL that may contain spaces and letters of any script
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18}|\*)")
_LENGTH = re.compile(r"\d{1,18}")
_ADVICE = {
    401: "it needs a login: set HF_TOKEN for the Hub, or write user:password@ into the URL",
    403: "access is refused; if it is gated on the Hub, accept its terms there and set HF_TOKEN",
    404: "there is no such file",
    410: "the file was removed",
}


class FetchError(Z2aError):
    """A download that failed and that trying again does not save."""

    status: int | None = None
    """The HTTP status, if that is the reason."""


class TransientError(Exception):
    """A request that failed and may succeed the next time."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True)
class HttpOrigin:
    """Whom credentials are for."""

    scheme: str
    host: str
    port: int | None

    @classmethod
    def of(cls, url: str) -> HttpOrigin:
        parts = split_url(url)
        return cls(parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}[parts.scheme])


@dataclass(frozen=True)
class ContentRange:
    """What part of a file a response has."""

    start: int
    stop: int
    total: int | None


def split_url(url: str) -> SplitResult:
    """The parts of a URL of the web; anything else is an error."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UsageError(f"{url[:200]!r} is not an http:// or https:// URL")
    return parts


class Response:
    """A response whose body is read in pieces, each within the time limit."""

    def __init__(self, url: str, inner: http.client.HTTPResponse, timeout: float, may_be_private: bool) -> None:
        self.url, self.status, self.headers = url, inner.status, inner.headers
        self.may_be_private = may_be_private
        """Whether the URL that the user named is in a private network, and a redirect may lead there."""
        self._inner, self._timeout = inner, timeout
        self._window_seconds, self._window_bytes = 0.0, 0

    def __enter__(self) -> Response:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inner.close()

    @property
    def length(self) -> int | None:
        """The announced length of the body. The number is as trustworthy as the server."""
        text = self.headers.get("Content-Length", "").strip()
        return int(text) if _LENGTH.fullmatch(text) else None

    @property
    def content_range(self) -> ContentRange | None:
        match = _CONTENT_RANGE.fullmatch(self.headers.get("Content-Range", "").strip())
        if match is None:
            return None
        start, stop = (int(match[1]), int(match[2]) + 1) if match[1] else (0, 0)
        return ContentRange(start, stop, None if match[3] == "*" else int(match[3]))

    @property
    def validator(self) -> str | None:
        """What changes when the file does."""
        for name in ("ETag", "Last-Modified"):
            if value := self.headers.get(name, "").strip():
                return f"{name.lower()}:{value[:512]}"
        return None

    @property
    def has_strong_validator(self) -> bool:
        """Whether the validator changes with every byte of the file, so that parts can be combined (RFC 9110, 8.8)."""
        if self.headers.get("ETag", "").strip():
            return not self.headers["ETag"].strip().startswith("W/")
        sent, modified = (_timestamp(self.headers.get(name, "")) for name in ("Date", "Last-Modified"))
        return sent is not None and modified is not None and sent - modified >= MIN_AGE

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes; none at the end of the body, also if it ends early."""
        began = time.monotonic()
        try:
            block = self._inner.read1(size)
        except (OSError, http.client.HTTPException) as error:
            raise TransientError(f"the connection broke ({_reason(error)})") from error
        self._check_rate(time.monotonic() - began, len(block))
        return block

    def read_all(self, limit: int) -> bytes:
        """The body, if it is not larger than ``limit``."""
        body = bytearray()
        while block := self.read(1 << 16):
            body += block
            if len(body) > limit:
                raise FetchError(f"{self.url}: the response is longer than {limit} bytes")
        return bytes(body)

    def _check_rate(self, seconds: float, received: int) -> None:
        """Time that the caller takes to write does not count."""
        self._window_seconds += seconds
        self._window_bytes += received
        if self._window_seconds >= self._timeout:
            if self._window_bytes < MIN_RATE * self._window_seconds:
                raise TransientError(f"the connection stalled ({self._window_bytes} bytes in {self._timeout:g} s)")
            self._window_seconds, self._window_bytes = 0.0, 0


@dataclass(frozen=True)
class HttpClient:
    """Threads can share it."""

    endpoint: str
    """URL of the Hub that the token is for."""
    token: str | None = field(default=None, repr=False)
    timeout: float = 30.0
    """Seconds to wait for a connection or for data."""

    def get(self, url: str, headers: Mapping[str, str] | None = None, may_be_private: bool | None = None) -> Response:
        """The response after redirects, with a status below 400, or 416 for a range that the file does not have.

        ``may_be_private``: of the response that redirected to this URL; None for one that the user named.
        """
        authorization, home, guard = self._authorization(url), HttpOrigin.of(url), RedirectGuard(may_be_private)
        current = _without_login(url)
        for _ in range(MAX_REDIRECTS + 1):
            here = authorization if HttpOrigin.of(current) == home else {}
            response = self._send(current, {**(headers or {}), **here}, guard)
            if response.status not in REDIRECT_STATUSES:
                return _checked(url, response)
            with response:
                current = _redirect_target(url, current, response.headers.get("Location", ""))
        raise FetchError(f"{url}: more than {MAX_REDIRECTS} redirects")

    def _authorization(self, url: str) -> dict[str, str]:
        parts = split_url(url)
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            return {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}
        if self.token is not None and HttpOrigin.of(url) == HttpOrigin.of(self.endpoint):
            return {"Authorization": f"Bearer {self.token}"}
        return {}

    def _send(self, url: str, headers: dict[str, str], guard: RedirectGuard) -> Response:
        parts = split_url(url)
        host = parts.hostname or ""
        try:
            opener = web_opener(parts.scheme, host, guard)
            agent = {"User-Agent": f"zero2all/{__version__}"}
            request = urllib.request.Request(quote(url, safe=_KEPT_CHARACTERS), headers=agent | headers)
            inner = opener.open(request, timeout=self.timeout)
        except PrivateAddressError as error:
            raise FetchError(
                f"redirected to {host}, which is {error}, an address of this machine or of a private network: if that "
                "is right, name the URL there yourself"
            ) from error
        except ssl.SSLCertVerificationError as error:
            raise _untrusted(host, error) from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise _untrusted(host, error.reason) from error
            raise TransientError(f"no connection to {host} ({_reason(error)})") from error
        except (OSError, http.client.RemoteDisconnected, http.client.BadStatusLine) as error:
            raise TransientError(f"no answer from {host} ({_reason(error)})") from error
        except (http.client.HTTPException, ValueError) as error:  # its text may quote a header
            raise FetchError(f"{url}: no valid HTTP ({type(error).__name__})") from error
        return Response(url, inner, self.timeout, bool(guard.may_be_private))


def _without_login(url: str) -> str:
    parts = split_url(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="").geturl()


def _checked(url: str, response: Response) -> Response:
    status = response.status
    if 200 <= status < 300 or status == 416:
        return response
    with response:
        if status in TRANSIENT_STATUSES or status >= 500:
            host = split_url(response.url).hostname
            raise TransientError(f"status {status} from {host}", _retry_after(response.headers.get("Retry-After", "")))
        error = FetchError(f"{url}: status {status}{': ' + _ADVICE[status] if status in _ADVICE else ''}")
        error.status = status
        raise error


def _redirect_target(url: str, current: str, location: str) -> str:
    try:  # headers are read as Latin-1; a path in another script is UTF-8
        location = location.encode("latin-1", "replace").decode("utf-8", "replace")
        target = _without_login(urljoin(current, location))
    except (UsageError, ValueError):
        raise FetchError(f"{url}: redirected to {location[:200]!r}, which is not http:// or https://") from None
    if current.startswith("https:") and not target.startswith("https:"):
        raise FetchError(f"{url}: redirected from https:// to http://, which anybody in between can change")
    return target


def _retry_after(text: str) -> float | None:
    """Seconds, given as such or as a date."""
    if _LENGTH.fullmatch(text.strip()):
        return float(text)
    until = _timestamp(text)
    return None if until is None else max(0.0, until - time.time())


def _timestamp(text: str) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _untrusted(host: str | None, error: ssl.SSLCertVerificationError) -> FetchError:
    return FetchError(
        f"the certificate of {host} is not trusted ({error.verify_message}); if it is your own server or proxy, name "
        "its certificate in SSL_CERT_FILE"
    )


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    return str(getattr(reason, "strerror", None) or reason) or type(reason).__name__
