"""Bytes from the other end of ssh, through the user's own OpenSSH client.

So host keys, agents, ProxyJump and ~/.ssh/config work as they do in a terminal, and the other side needs nothing but
sshd and POSIX tools. One connection stays open with a plain ``sh`` at its end; each request is a line of shell that
only reads. A connection that is lost is made again, waiting longer each time, and reading goes on at the same byte.
"""

from __future__ import annotations

import os
import re
import secrets
import select
import shlex
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import IO
from urllib.parse import unquote, urlsplit

from zero2all.errors import UsageError, Z2aError

PATIENCE = 20.0  # seconds for one answer
LONGEST_WAIT = 15.0
OPTIONS = ("-T", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "ConnectTimeout=10")
HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:%-]*")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@\\-]*")


class Unreachable(Z2aError):
    """A place that cannot be read just now; of ssh the message holds the last words."""


@dataclass(frozen=True)
class Address:
    user: str | None
    host: str
    port: int | None

    @property
    def words(self) -> list[str]:
        """Arguments of ssh. After ``--`` nothing is read as an option."""
        port = ["-p", str(self.port)] if self.port else []
        return [*port, "--", f"{self.user}@{self.host}" if self.user else self.host]


def parse_address(url: str) -> tuple[Address, str]:
    """``ssh://me@host:2222/runs/first`` -> who and where, and the path. ``/~/x`` is below the home directory."""
    try:
        parts = urlsplit(url)
        user, host, port = parts.username, parts.hostname or "", parts.port
    except ValueError as error:
        raise UsageError(f"{url!r} is not ssh://[user@]host[:port]/path ({error})") from None
    path = unquote(parts.path).rstrip("/")
    wrong_user = user is not None and not USER.fullmatch(unquote(user))
    if wrong_user or not HOST.fullmatch(host) or not path or "\n" in path or "\0" in path:
        raise UsageError(f"{url!r} is not ssh://[user@]host[:port]/path")
    return Address(unquote(user) if user else None, host, port), path.removeprefix("/~/")


class Connection:
    """One ssh process; requests from several threads take turns."""

    def __init__(self, address: Address, ssh: str = "ssh") -> None:
        self.host, self._command = address.host, [*shlex.split(ssh), *OPTIONS, *address.words, "exec sh"]
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._received = bytearray()
        self._lock = threading.Lock()
        self._failures, self._not_before, self._last_words = 0, 0.0, ""

    def sizes(self, directory: str, patterns: list[str]) -> dict[str, int]:
        """Bytes of the files in ``directory`` that match, by name."""
        body = 'if [ -f "$f" ]; then printf "%s %s\\n" "$(wc -c <"$f")" "$f"; fi'
        lines = self._lines(f"cd -- {shlex.quote(directory)} && for f in {' '.join(patterns)}; do {body}; done")
        return {name: int(size) for size, name in (line.split(maxsplit=1) for line in lines)}

    def matches(self, directory: str, patterns: list[str]) -> list[str]:
        body = 'if [ -f "$f" ]; then printf "%s\\n" "$f"; fi'
        return self._lines(f"cd -- {shlex.quote(directory)} && for f in {' '.join(patterns)}; do {body}; done")

    def read(self, path: str, start: int, length: int) -> bytes:
        """Bytes that are known to be there: a record only grows."""
        return self._ask(f"tail -c +{start + 1} -- {shlex.quote(path)} | head -c {length}", length)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _lines(self, script: str) -> list[str]:
        return self._ask(script, None).decode("utf-8", "replace").splitlines()

    def _ask(self, script: str, length: int | None) -> bytes:
        """Run a line of shell at the other end: ``length`` bytes of answer, or up to a mark."""
        with self._lock:
            if time.monotonic() < self._not_before:
                raise Unreachable(f"{self.host}: {self._last_words or 'waiting to connect again'}")
            try:
                self._connect()
                mark = f"z2a-{secrets.token_hex(8)}\n".encode()
                self._send(f"( {script} ) </dev/null 2>/dev/null; printf '{mark.decode()[:-1]}\\n'\n")
                answer = self._receive(length) if length is not None else b""
                rest = self._receive_until(mark)
            except (OSError, Unreachable) as error:
                self._end()
                self._failures += 1
                self._not_before = time.monotonic() + min(2.0 ** (self._failures - 1), LONGEST_WAIT)
                raise Unreachable(f"{self.host}: {self._last_words or error}") from error
            return answer if length is not None else rest

    def _connect(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0
            )
        except OSError as error:
            raise UsageError(f"ssh cannot be started ({error}); is OpenSSH's client installed?") from error
        hello = f"z2a-{secrets.token_hex(8)}\n"
        self._send(f"printf '{hello[:-1]}\\n'\n")
        self._receive_until(hello.encode())  # and so past whatever a login script printed
        self._failures, self._last_words = 0, ""

    def _send(self, text: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())

    def _receive(self, length: int) -> bytes:
        until = time.monotonic() + PATIENCE
        while len(self._received) < length:
            if self._more(until):
                until = time.monotonic() + PATIENCE
        taken = bytes(self._received[:length])
        del self._received[:length]
        return taken

    def _receive_until(self, mark: bytes) -> bytes:
        until = time.monotonic() + PATIENCE
        while (at := self._received.find(mark)) < 0:
            self._more(until)
        taken = bytes(self._received[:at])
        del self._received[: at + len(mark)]
        return taken

    def _more(self, until: float) -> bool:
        assert self._process is not None
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
        if not readable:
            raise Unreachable("no answer")
        data = os.read(self._process.stdout.fileno(), 2**20)
        if not data:
            raise Unreachable("the connection was closed")
        self._received += data
        return True

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
        if self._errors is not None:
            self._errors.seek(0)
            said = [
                line.strip() for line in self._errors.read().decode("utf-8", "replace").splitlines() if line.strip()
            ]
            self._last_words = said[-1] if said else self._last_words
            self._errors.close()
        self._process, self._errors = None, None
        self._received.clear()
