"""Bytes from the other end of ssh, through the user's own OpenSSH client.

So host keys, agents, ProxyJump and ~/.ssh/config work as they do in a terminal, and the other side needs nothing but
sshd and POSIX tools. One connection stays open with a plain ``sh`` at its end; each request is a line of shell that
only reads. A connection that is lost is made again, waiting longer each time, and reading goes on at the same byte.

The other end is not trusted: every answer has a limit in bytes and in time, and sizes that it names are not relied on.
"""

from __future__ import annotations

import os
import re
import secrets
import select
import shlex
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import IO
from urllib.parse import unquote, urlsplit

from zero2all.errors import UsageError, Z2aError

PATIENCE = 20.0  # seconds for one answer,
SLOWEST = 64 * 2**10  # and a second more for so many bytes of it
LISTING = 4 * 2**20  # bytes of a list of files
LAST_WORDS = 500  # bytes of what ssh says on stderr
SIZE_DIGITS = 15
LONGEST_WAIT = 15.0
OPTIONS = ("-T", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "ConnectTimeout=10")
HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._%-]*|[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")  # a name, or IPv6
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
        user, host, port = parts.username, unquote(parts.hostname or ""), parts.port
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
        self._received, self._said, self._deaf = bytearray(), b"", False
        self._lock = threading.Lock()
        self._failures, self._not_before, self._last_words = 0, 0.0, ""

    def sizes(self, directory: str, patterns: list[str]) -> dict[str, int]:
        """Bytes of the files in ``directory`` that match, by name."""
        body = 'if [ -f "$f" ]; then printf "%s %s\\n" "$(wc -c <"$f")" "$f"; fi'
        lines = self._lines(f"cd -- {shlex.quote(directory)} && for f in {' '.join(patterns)}; do {body}; done")
        found = [line.split(maxsplit=1) for line in lines]
        sizes = {part[1]: int(part[0]) for part in found if len(part) == 2 and _is_size(part[0])}
        if lines and not sizes:
            raise Unreachable(f"{self.host}: its list of files makes no sense: {lines[0][:80]!r}")
        return sizes

    def matches(self, directory: str, patterns: list[str]) -> list[str]:
        body = 'if [ -f "$f" ]; then printf "%s\\n" "$f"; fi'
        return self._lines(f"cd -- {shlex.quote(directory)} && for f in {' '.join(patterns)}; do {body}; done")

    def read(self, path: str, start: int, length: int) -> bytes:
        """At most ``length`` bytes from ``start`` on: fewer where the file ends before."""
        return self._ask(f"tail -c +{start + 1} -- {shlex.quote(path)} | head -c {length}", length)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _lines(self, script: str) -> list[str]:
        return self._ask(script, LISTING).decode("utf-8", "replace").split("\n")[:-1]

    def _ask(self, script: str, limit: int) -> bytes:
        """Run a line of shell at the other end; its answer, which ends with a mark that nobody can foresee."""
        with self._lock:
            if time.monotonic() < self._not_before:
                raise Unreachable(f"{self.host}: {self._last_words or 'waiting to connect again'}")
            try:
                self._connect()
                mark = f"z2a-{secrets.token_hex(8)}\n".encode()
                self._send(f"( {script} ) </dev/null 2>/dev/null; printf '{mark.decode()[:-1]}\\n'\n")
                return self._receive_until(mark, limit)
            except (OSError, Unreachable) as error:
                self._end()
                self._failures += 1
                self._not_before = time.monotonic() + min(2.0 ** (self._failures - 1), LONGEST_WAIT)
                self._last_words = self._last_words or str(error)
                raise Unreachable(f"{self.host}: {self._last_words}") from error

    def _connect(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        self._last_words = ""
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
            )
        except OSError as error:
            raise UsageError(f"ssh cannot be started ({error}); is OpenSSH's client installed?") from error
        hello = f"z2a-{secrets.token_hex(8)}\n"
        self._send(f"printf '{hello[:-1]}\\n'\n")
        self._receive_until(hello.encode(), LISTING)  # and so past whatever a login script printed
        self._failures = 0

    def _send(self, text: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())

    def _receive_until(self, mark: bytes, limit: int) -> bytes:
        until = time.monotonic() + PATIENCE + limit / SLOWEST
        searched = 0
        while (at := self._received.find(mark, searched)) < 0:
            if len(self._received) > limit + len(mark):
                raise Unreachable(f"an answer of more than {limit} bytes")
            searched = max(0, len(self._received) - len(mark))
            self._more(until)
        if at > limit:
            raise Unreachable(f"an answer of more than {limit} bytes")
        taken = bytes(self._received[:at])
        del self._received[: at + len(mark)]
        return taken

    def _more(self, until: float) -> None:
        """Wait for more of an answer. What arrives on stderr is kept as far as a message needs it."""
        assert self._process is not None
        assert self._process.stdout is not None
        streams = [stream for stream in (self._process.stdout, self._stderr) if stream is not None]
        quiet = min(PATIENCE, until - time.monotonic())
        readable = select.select(streams, [], [], quiet)[0] if quiet > 0 else []
        if not readable:
            raise Unreachable("no answer in time")
        if self._stderr in readable:
            self._hear()
        if self._process.stdout in readable:
            data = os.read(self._process.stdout.fileno(), 2**20)
            if not data:
                raise Unreachable("the connection was closed")
            self._received += data

    @property
    def _stderr(self) -> IO[bytes] | None:
        return None if self._process is None or self._deaf else self._process.stderr

    def _hear(self) -> bool:
        """Read once from stderr; False at its end."""
        assert self._process is not None
        assert self._process.stderr is not None
        data = os.read(self._process.stderr.fileno(), 2**16)
        self._deaf = not data
        self._said = (self._said + data)[-LAST_WORDS:]
        return bool(data)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            while self._stderr is not None and select.select([self._stderr], [], [], 0)[0] and self._hear():
                pass  # a pipe holds little, and nobody writes to it any more
            for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
                if stream is not None:
                    stream.close()
        said = [line.strip() for line in self._said.decode("utf-8", "replace").splitlines() if line.strip()]
        self._last_words = said[-1] if said else self._last_words
        self._process, self._said, self._deaf = None, b"", False
        self._received.clear()


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= SIZE_DIGITS
