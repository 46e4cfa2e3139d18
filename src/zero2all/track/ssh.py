"""Reads remote files over ssh, through the user's own OpenSSH client.

So host keys, agents, ProxyJump and ~/.ssh/config work as they do in a terminal, and the remote host needs only sshd and
POSIX tools. One connection stays open to a plain ``sh``; each request is a line of shell that only reads. A lost
connection is retried with exponential backoff, and reading resumes at the same byte.

The remote host is not trusted: every response has a byte limit and a timeout, and reported sizes are not relied on.
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

from zero2all.base.errors import UsageError, Z2aError

ANSWER_TIMEOUT = 20.0  # seconds for one response,
MIN_BYTES_PER_SECOND = 64 * 2**10  # plus the time for its byte limit at this rate
MAX_LISTING_BYTES = 4 * 2**20  # of a list of files
MAX_STDERR_BYTES = 500  # the last of ssh's stderr, for error messages
SIZE_DIGITS = 15
MAX_BACKOFF_SECONDS = 15.0
SSH_OPTIONS = ("-T", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "ConnectTimeout=10")
HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._%-]*|[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")  # a name, or IPv6
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@\\-]*")


class UnreachableError(Z2aError):
    """A location that cannot be read at the moment; for ssh the message is the last line of stderr."""


@dataclass(frozen=True)
class SshAddress:
    user: str | None
    host: str
    port: int | None

    @property
    def ssh_arguments(self) -> list[str]:
        """Arguments of ssh. After ``--`` nothing is parsed as an option."""
        port = ["-p", str(self.port)] if self.port else []
        return [*port, "--", f"{self.user}@{self.host}" if self.user else self.host]


def parse_address(url: str) -> tuple[SshAddress, str]:
    """``ssh://me@host:2222/runs/first`` -> the address and the path. ``/~/x`` is below the home directory."""
    try:
        parts = urlsplit(url)
        user, host, port = parts.username, unquote(parts.hostname or ""), parts.port
    except ValueError as error:
        raise UsageError(f"{url!r} is not ssh://[user@]host[:port]/path ({error})") from None
    path = unquote(parts.path).rstrip("/")
    is_bad_user = user is not None and not USER.fullmatch(unquote(user))
    if is_bad_user or not HOST.fullmatch(host) or not path or "\n" in path or "\0" in path:
        raise UsageError(f"{url!r} is not ssh://[user@]host[:port]/path")
    return SshAddress(unquote(user) if user else None, host, port), path.removeprefix("/~/")


class SshConnection:
    """One ssh process; requests from several threads are serialized."""

    def __init__(self, address: SshAddress, ssh: str = "ssh") -> None:
        self.host, self._command = address.host, [*shlex.split(ssh), *SSH_OPTIONS, *address.ssh_arguments, "exec sh"]
        self._process: subprocess.Popen[bytes] | None = None
        self._received, self._stderr_tail, self._stderr_closed = bytearray(), b"", False
        self._lock = threading.Lock()
        self._failures, self._retry_after, self._last_error = 0, 0.0, ""

    def file_sizes(self, directory: str, patterns: list[str]) -> dict[str, int]:
        """Bytes of the files in ``directory`` that match, by name."""
        body = 'if [ -f "$f" ]; then printf "%s %s\\n" "$(wc -c <"$f")" "$f"; fi'
        lines = self._lines(f"cd -- {shlex.quote(directory)} && for f in {' '.join(patterns)}; do {body}; done")
        fields = [line.split(maxsplit=1) for line in lines]
        sizes = {field[1]: int(field[0]) for field in fields if len(field) == 2 and _is_size(field[0])}
        if lines and not sizes:
            raise UnreachableError(f"{self.host}: invalid list of files: {lines[0][:80]!r}")
        return sizes

    def find_files(self, directory: str, name: str, depth: int, unsearched: list[str]) -> list[str]:
        """Files of this name in at most ``depth`` directories below; directories that match a pattern are left out."""
        too_deep = f"-path {shlex.quote('./' + '*/' * depth + '*')} ! -name {shlex.quote(name)}"
        pruned = " -o ".join([too_deep, *(f"-name {shlex.quote(pattern)}" for pattern in unsearched)])
        find = f"find -L . \\( {pruned} \\) -prune -o -name {shlex.quote(name)} -type f -print"
        return [line.removeprefix("./") for line in self._lines(f"cd -- {shlex.quote(directory)} && {find}")]

    def read(self, path: str, start: int, length: int) -> bytes:
        """Read up to ``length`` bytes from ``start`` on; fewer at the end of the file."""
        return self._run_script(f"tail -c +{start + 1} -- {shlex.quote(path)} | head -c {length}", length)

    def close(self) -> None:
        with self._lock:
            self._terminate()

    def _lines(self, script: str) -> list[str]:
        return self._run_script(script, MAX_LISTING_BYTES).decode("utf-8", "replace").split("\n")[:-1]

    def _run_script(self, script: str, limit: int) -> bytes:
        """Run a line of shell on the remote host. Its output ends with an unpredictable marker."""
        with self._lock:
            if time.monotonic() < self._retry_after:
                raise UnreachableError(f"{self.host}: {self._last_error or 'waiting to reconnect'}")
            try:
                self._connect()
                marker = f"z2a-{secrets.token_hex(8)}\n".encode()
                self._send(f"( {script} ) </dev/null 2>/dev/null; printf '{marker.decode()[:-1]}\\n'\n")
                return self._receive_until(marker, limit)
            except (OSError, UnreachableError) as error:
                self._terminate()
                self._failures += 1
                self._retry_after = time.monotonic() + min(2.0 ** (self._failures - 1), MAX_BACKOFF_SECONDS)
                self._last_error = self._last_error or str(error)
                raise UnreachableError(f"{self.host}: {self._last_error}") from error

    def _connect(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._terminate()
        self._last_error = ""
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
            )
        except OSError as error:
            raise UsageError(f"ssh cannot be started ({error}); is OpenSSH's client installed?") from error
        greeting = f"z2a-{secrets.token_hex(8)}\n"
        self._send(f"printf '{greeting[:-1]}\\n'\n")
        self._receive_until(greeting.encode(), MAX_LISTING_BYTES)  # skips what a login script printed
        self._failures = 0

    def _send(self, text: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())

    def _receive_until(self, marker: bytes, limit: int) -> bytes:
        deadline = time.monotonic() + ANSWER_TIMEOUT + limit / MIN_BYTES_PER_SECOND
        searched = 0
        while (end := self._received.find(marker, searched)) < 0:
            if len(self._received) > limit + len(marker):
                raise UnreachableError(f"a response of more than {limit} bytes")
            searched = max(0, len(self._received) - len(marker))
            self._receive_more(deadline)
        if end > limit:
            raise UnreachableError(f"a response of more than {limit} bytes")
        response = bytes(self._received[:end])
        del self._received[: end + len(marker)]
        return response

    def _receive_more(self, deadline: float) -> None:
        """Wait for more of a response. Keeps the tail of stderr for error messages."""
        assert self._process is not None
        assert self._process.stdout is not None
        streams = [stream for stream in (self._process.stdout, self._stderr) if stream is not None]
        timeout = min(ANSWER_TIMEOUT, deadline - time.monotonic())
        readable = select.select(streams, [], [], timeout)[0] if timeout > 0 else []
        if not readable:
            raise UnreachableError("no response in time")
        if self._stderr in readable:
            self._read_stderr()
        if self._process.stdout in readable:
            data = os.read(self._process.stdout.fileno(), 2**20)
            if not data:
                raise UnreachableError("the connection was closed")
            self._received += data

    @property
    def _stderr(self) -> IO[bytes] | None:
        return None if self._process is None or self._stderr_closed else self._process.stderr

    def _read_stderr(self) -> bool:
        """Read once from stderr. Returns False at end of file."""
        assert self._process is not None
        assert self._process.stderr is not None
        data = os.read(self._process.stderr.fileno(), 2**16)
        self._stderr_closed = not data
        self._stderr_tail = (self._stderr_tail + data)[-MAX_STDERR_BYTES:]
        return bool(data)

    def _terminate(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            while self._stderr is not None and select.select([self._stderr], [], [], 0)[0] and self._read_stderr():
                pass  # a pipe buffer is small, and the writer is dead
            for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
                if stream is not None:
                    stream.close()
        messages = [line.strip() for line in self._stderr_tail.decode("utf-8", "replace").splitlines() if line.strip()]
        self._last_error = messages[-1] if messages else self._last_error
        self._process, self._stderr_tail, self._stderr_closed = None, b"", False
        self._received.clear()


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= SIZE_DIGITS
