"""A client of an OpenAI-compatible API: JSON over HTTP, with retries, a limit of the reply and a key."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from zero2all.errors import UsageError, Z2aError
from zero2all.redact import redact

API_KEY = "Z2A_API_KEY"
"""The environment variable with the key."""
MAX_REPLY_BYTES = 50_000_000
RETRIES = 4
RETRY_SECONDS = 1.0
BUSY, TIMEOUT = 429, 408
MAX_REASON = 300  # characters


class UnansweredError(Z2aError):
    """The endpoint gave no answer after all retries."""


@dataclass(frozen=True)
class Endpoint:
    """
    >>> Endpoint("http://127.0.0.1:8000/v1").post("completions", {"prompt": "a"})
    """

    url: str
    timeout: float = 120.0

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise UsageError(f"the endpoint must begin with http:// or https://; it is {redact(self.url)}")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """What it replies. Raises ``UnansweredError`` after some retries, another error at once if none would help."""
        url, key = f"{self.url.rstrip('/')}/{path}", os.environ.get(API_KEY)
        reason, attempt, busy_until = "", 0, time.monotonic() + self.timeout
        while attempt < RETRIES:
            if attempt:
                time.sleep(RETRY_SECONDS * 2 ** (attempt - 1))
            attempt += 1
            request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
            if key:  # not to where a server redirects
                request.add_unredirected_header("Authorization", f"Bearer {key}")
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    return json.loads(reply.read(MAX_REPLY_BYTES))
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}"
                if error.code == BUSY and time.monotonic() < busy_until:
                    attempt = 0  # it works, and others are first
                    time.sleep(RETRY_SECONDS)
                elif 400 <= error.code < 500 and error.code not in (BUSY, TIMEOUT):  # no retry changes that
                    remedy = f"check the endpoint, the name of the model and {API_KEY}"
                    raise Z2aError(f"{redact(url)} answers HTTP {error.code}{_reason(error)}: {remedy}") from None
            except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
                reason = f"{type(error).__name__}: {error}"[:200]
        raise UnansweredError(f"{redact(url)} does not answer: {reason}")


def _reason(error: urllib.error.HTTPError) -> str:
    """What the server says in OpenAI's format, in brackets."""
    try:
        message = json.loads(error.read(MAX_REPLY_BYTES))["error"]["message"]
    except Exception:  # whatever it sent
        return ""
    return f" ({redact(str(message))[:MAX_REASON]})"
