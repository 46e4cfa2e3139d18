"""Run code in a sandbox, and say how it ended."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Literal

from zero2all.errors import UsageError, Z2aError
from zero2all.sandbox.backends import Backend, Launch, Limits, bubblewrap, sandlock, unconfined
from zero2all.sandbox.seccomp import seccomp_filter

BackendName = Literal["sandlock", "bubblewrap", "none"]
Status = Literal["ok", "failed", "timeout", "memory", "killed"]
REPORTED: tuple[Status, ...] = ("ok", "failed", "memory")  # by the child
BACKENDS: dict[BackendName, Backend] = {"sandlock": sandlock, "bubblewrap": bubblewrap, "none": unconfined}
DEFAULT_LIMITS = Limits()
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # exit statuses
START_SECONDS = 60.0  # of a backend on a busy machine
GRACE_SECONDS = 10.0  # for a backend to end the processes of the code


@dataclass(frozen=True)
class CodeResult:
    """How code ended."""

    status: Status
    """``ok``: it ran to its last line. ``failed``: an exception, also ``SystemExit``. ``timeout``. ``memory``: an
    allocation failed, or SIGKILL, by which sandlock and the kernel end processes that use too much. ``killed``: the
    process ended in another way, by a signal or by ``os._exit``."""
    stdout: str
    stderr: str
    """With the traceback."""
    seconds: float


@dataclass(frozen=True)
class Sandbox:
    """Runs code, also from several threads at once. See :func:`open_sandbox`."""

    backend: BackendName
    limits: Limits = DEFAULT_LIMITS

    def run_python(self, code: str) -> CodeResult:
        """Run code as ``__main__`` with the standard library, in an empty directory, without input and network.

        >>> open_sandbox().run_python("print(1 + 1)").stdout
        '2\\n'
        """
        mark = f"\0{secrets.token_hex(16)}\0"
        with _empty_directory() as directory:
            launch = BACKENDS[self.backend](directory, self.limits)
            request = {
                "code": code,
                "mark": mark,
                "uid": launch.uid,
                "filter": seccomp_filter().hex() if launch.is_confined else None,
                "rlimits": launch.rlimits,
            }
            with _started(launch, directory) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                assert process.stderr is not None
                stdout = _Output(process.stdout, self.limits.output + len(mark))
                stderr = _Output(process.stderr, self.limits.output)
                _send(process.stdin, json.dumps(request).encode())
                stdout.first.wait(START_SECONDS)  # the time of the backend is not that of the code
                started = time.monotonic()
                timed_out = not _ends_within(process, self.limits.seconds)
                seconds = time.monotonic() - started
                _end(process)
                stdout.join(GRACE_SECONDS)
                stderr.join(GRACE_SECONDS)
        status: Status = "timeout" if timed_out else "memory" if process.returncode in KILLED else "killed"
        return _result(mark.encode(), stdout, stderr, status, seconds, self.backend)


def open_sandbox(limits: Limits = DEFAULT_LIMITS, unsafe: bool = False) -> Sandbox:
    """The first of sandlock and bubblewrap that works on this machine; with ``unsafe`` none, if neither does."""
    reasons: list[str] = []
    candidates: tuple[tuple[BackendName, bool, str], ...] = (
        ("sandlock", find_spec("sandlock") is not None, "pip install 'zero2all[evals]'"),
        ("bubblewrap", shutil.which("bwrap") is not None, "install the system package bubblewrap"),
    )
    for name, is_installed, remedy in candidates:
        if not is_installed:
            reasons.append(f"{name} is not installed ({remedy})")
            continue
        try:
            result = Sandbox(name).run_python("print(1 + 1)")
        except Z2aError as error:
            reasons.append(str(error))
            continue
        if (result.status, result.stdout) == ("ok", "2\n"):
            return Sandbox(name, limits)
        reasons.append(f"{name}: {result.status}: {result.stderr.strip()[-300:]}")
    if unsafe:
        return Sandbox("none", limits)
    raise UsageError(
        "code of a model runs only in a sandbox, and none works here: "
        + "; ".join(reasons)
        + ". --unsafe-code runs it without a sandbox: only on a machine that you can lose"
    )


class _Output:
    """Reads a stream to its end in a thread, and keeps its beginning and the last bytes."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self.head, self.tail, self.total = bytearray(), b"", 0
        self.first = threading.Event()
        """Set with the first bytes, or at the end."""
        self._stream, self._limit = stream, limit
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _read(self) -> None:
        while chunk := os.read(self._stream.fileno(), 65536):
            self.head += chunk[: self._limit - len(self.head)]
            self.tail = (self.tail + chunk)[-256:]
            self.total += len(chunk)
            self.first.set()
        self.first.set()


def _result(
    mark: bytes, stdout: _Output, stderr: _Output, status: Status, seconds: float, backend: BackendName
) -> CodeResult:
    errors = stderr.head.decode(errors="replace")
    if not stdout.head.startswith(mark):
        raise Z2aError(f"the sandbox ({backend}) did not start: {errors.strip()[-500:] or 'no message'}")
    end = stdout.total
    for reported in REPORTED if status != "timeout" else ():
        trailer = mark + reported.encode()
        if stdout.tail.endswith(trailer):
            status, end = reported, stdout.total - len(trailer)
    return CodeResult(status, stdout.head[len(mark) : end].decode(errors="replace"), errors, seconds)


@contextmanager
def _empty_directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="z2a-sandbox-"))
    try:
        yield directory
    finally:
        # rm: directories that code has nested a thousand deep are too deep for Python's own recursion.
        subprocess.run(["rm", "-rf", "--", str(directory)], check=False, stderr=subprocess.DEVNULL)


@contextmanager
def _started(launch: Launch, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        launch.command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=directory,
        env=launch.env,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            _end(process)


def _send(stream: IO[bytes], content: bytes) -> None:
    with suppress(BrokenPipeError):  # it did not start
        stream.write(content)
        stream.flush()
    with suppress(BrokenPipeError):
        stream.close()


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its group. SIGTERM first: the process of sandlock then ends those that left the group."""
    if process.poll() is None:
        process.terminate()
        if not _ends_within(process, GRACE_SECONDS):
            process.kill()
            process.wait()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
