"""What happens to a job that a person may want to know, and who is told: a command that is run, or a webhook.

Events are delivered in order by a background thread, each within a few seconds or not at all: the agent never waits. A
hook that fails is logged once; what it prints is dropped, since it may contain secrets.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from zero2all.base.console import say
from zero2all.base.environment import ISLANDS_SECRET_VARIABLE, JOB_SECRET_VARIABLE, NOTIFY_VARIABLE
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.records import to_json
from zero2all.base.redact import REDACTED, redact

EventKind = Literal[
    "node lost",
    "node excluded",
    "spare taken in",
    "GPU error",
    "job restarted",
    "job waits",
    "job gave up",
    "job finished",
]


@dataclass(frozen=True)
class JobEvent:
    kind: EventKind
    text: str
    """One line for a person."""
    node: str | None = None
    """Name and address, if it is about one node."""


TIMEOUT = 5.0  # seconds for one delivery
FLUSH_TIMEOUT = 2 * TIMEOUT  # seconds at the end of the job for what is still queued
MAX_QUEUED = 100


@dataclass(frozen=True)
class Notification:
    """What a hook gets, as JSON."""

    event: EventKind
    text: str
    node: str | None
    """The node that the event is about."""
    sender: str
    """The host that sends it."""
    time: float
    """Seconds since 1970."""
    command: str
    """What the job runs."""
    run: str | None
    """The run directory, once it is known."""


class Notifier:
    """
    >>> notifier = Notifier("https://hooks.example.com/services/T0/B0/secret", ["train", "my.yaml"])
    >>> notifier.send(JobEvent("job finished", "the job is done"))
    >>> notifier.close()
    """

    def __init__(self, hook: str | None, command: Sequence[str]) -> None:
        """``hook`` is a URL, or a command line; None does nothing."""
        self.find_run: Callable[[], Path | None] = lambda: None
        self._command = redact(shlex.join(command))
        self._url, self._words = parse_hook(hook)
        self._queue: queue.Queue[Notification | None] = queue.Queue(MAX_QUEUED)
        self._failure_logged = False
        self._thread: threading.Thread | None = None
        if hook is not None:
            self._thread = threading.Thread(target=self._deliver_all, name="z2a-notify", daemon=True)
            self._thread.start()

    def send(self, event: JobEvent) -> None:
        """Returns at once."""
        if self._thread is None:
            return
        run = self.find_run()
        notification = Notification(
            event.kind,
            redact(event.text),
            event.node,
            socket.gethostname(),
            time.time(),
            self._command,
            None if run is None else str(run),
        )
        try:
            self._queue.put_nowait(notification)
        except queue.Full:
            self._log_failure("it is too slow, and events are dropped")

    def close(self) -> None:
        """Waits a few seconds for what is queued."""
        if self._thread is not None:
            with suppress(queue.Full):
                self._queue.put_nowait(None)
            self._thread.join(FLUSH_TIMEOUT)

    def _deliver_all(self) -> None:
        while (notification := self._queue.get()) is not None:
            body = json.dumps(to_json(notification), ensure_ascii=False).encode()
            reason = post(self._url, body) if self._url is not None else run_hook(self._words, body)
            if reason is not None:
                self._log_failure(reason)

    def _log_failure(self, reason: str) -> None:
        if not self._failure_logged:
            self._failure_logged = True
            where = self._words[0] if self._url is None else masked(self._url)
            say(f"warning: --notify {where} failed: {reason}; the job continues, and later failures are not logged")


def parse_hook(hook: str | None) -> tuple[str | None, list[str]]:
    """The URL, or the words of the command."""
    if hook is None:
        return None, []
    if hook.startswith(("http://", "https://")):
        if not urlsplit(hook).hostname:
            raise UsageError("--notify: the URL has no host")
        return hook, []
    try:
        words = shlex.split(hook)
    except ValueError as error:
        raise UsageError(f"--notify: {error}") from None
    if not words or "://" in words[0]:
        raise UsageError("--notify takes a command, or a URL that begins with https:// or http://")
    return None, words


def masked(url: str) -> str:
    """The URL with only scheme and host: the path of a webhook is often its secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}/{REDACTED}"


def post(url: str, body: bytes) -> str | None:
    """Why it failed, if so; without the URL, and without what the server says."""
    from zero2all.base.network.http_client import TransientError, shared_client  # only where a webhook is

    try:
        headers = {"Content-Type": "application/json"}
        status = shared_client(TIMEOUT).post(url, content=body, headers=headers).status_code
    except (TransientError, Z2aError) as error:
        return str(error) if isinstance(error, TransientError) else "it cannot be reached"
    return None if 200 <= status < 300 else f"status {status}"


def run_hook(words: Sequence[str], body: bytes) -> str | None:
    """Why it failed, if so."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in (JOB_SECRET_VARIABLE, ISLANDS_SECRET_VARIABLE, NOTIFY_VARIABLE)
    }
    try:
        hook = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        return error.strerror or "it cannot be started"
    try:
        hook.communicate(body, timeout=TIMEOUT)
        return f"exit status {hook.returncode}" if hook.returncode else None
    except subprocess.TimeoutExpired:
        return f"still running after {TIMEOUT:.0f} s, and killed"
    finally:
        with suppress(OSError):
            os.killpg(hook.pid, signal.SIGKILL)  # with whatever it has started
        hook.wait()
