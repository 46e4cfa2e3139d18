"""A client of an OpenAI-compatible API: JSON over HTTP, with retries and a key."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import httpx2

from zero2all.base.errors import Z2aError
from zero2all.base.network.http_client import (
    Backoff,
    TransientError,
    is_transient,
    retry_after,
    shared_client,
    split_url,
)
from zero2all.base.redact import redact

API_KEY = "Z2A_API_KEY"
"""The environment variable with the key."""
BUSY = 429
BUSY_SECONDS = 1.0
MAX_REASON = 300  # characters


@dataclass(frozen=True)
class Endpoint:
    """
    >>> Endpoint("http://127.0.0.1:8000/v1").post("completions", {"prompt": "a"})
    """

    url: str
    timeout: float = 120.0

    def __post_init__(self) -> None:
        split_url(self.url)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """What it replies. Raises ``UnansweredError`` after some retries, another error at once if none would help."""
        url, key = f"{self.url.rstrip('/')}/{path}", os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        backoff, busy_until = Backoff(redact(url)), time.monotonic() + self.timeout
        while True:
            try:
                reply = shared_client(self.timeout).post(url, json=body, headers=headers)
                if reply.status_code == 200:
                    return reply.json()
            except TransientError as error:
                backoff.wait(error)
            except (ValueError, RecursionError):
                backoff.wait(TransientError("the answer is not JSON"))
            else:
                if not is_transient(reply.status_code):
                    remedy = f"check the endpoint, the name of the model and {API_KEY}"
                    raise Z2aError(f"{redact(url)} answers HTTP {reply.status_code}{_reason(reply)}: {remedy}")
                is_busy = reply.status_code == BUSY and time.monotonic() < busy_until  # it works, and others are first
                seconds = retry_after(reply) or (BUSY_SECONDS if is_busy else None)
                backoff.wait(TransientError(f"HTTP {reply.status_code}", seconds), has_progressed=is_busy)


def _reason(reply: httpx2.Response) -> str:
    """What the server says in OpenAI's format, in brackets."""
    try:
        message = reply.json()["error"]["message"]
    except Exception:  # whatever it sent
        return ""
    return f" ({redact(str(message))[:MAX_REASON]})"
