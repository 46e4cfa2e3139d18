"""Run code in a sandbox: start its processes, talk to them, end them, and say how the code ended."""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Literal

from zero2all.base.errors import UsageError, Z2aError
from zero2all.sandbox.backends import Backend, Launch, Limits, bubblewrap, sandlock, unconfined
from zero2all.sandbox.seccomp import seccomp_filter

Status = Literal["ok", "failed", "timeout", "memory", "killed", "unsupported"]
REPORTED: tuple[Status, ...] = ("ok", "failed", "memory", "unsupported")  # by the child
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # exit statuses
START_SECONDS = 60.0  # of a backend on a busy machine
GRACE_SECONDS = 10.0  # for a backend to end the processes of the code
MESSAGE_BYTES = 16 * 2**20
_NO_LENGTH = b"\xff" * 4  # no message is so long


class SandboxProcess:
    """A process that executes code in a sandbox."""

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.process = process
        self.stdin, self.stdout = process.stdin, process.stdout
        self.stderr = Output(process.stderr, limits.output)
        self.mark = _NO_LENGTH + secrets.token_hex(16).encode()
        """Its first and its last output are behind this."""
        self.status: Status | None = None
        """What it reported; of a process that exchanges messages."""
        self._buffer = bytearray()

    def start(self, work: Mapping[str, object]) -> None:
        """Send the code."""
        content = framed({"mark": self.mark.decode("latin-1"), "work": work})
        with suppress(BrokenPipeError):  # it did not start
            self.stdin.write(content)
            self.stdin.flush()

    def wait_ready(self, backend: str) -> None:
        """Wait until it executes the code: the backend's time does not count."""
        deadline = time.monotonic() + START_SECONDS
        with suppress(TimeoutError):
            if self._take(len(self.mark), deadline) == self.mark:
                return
        self.stderr.join(1.0)
        raise start_error(backend, self.stderr)

    def receive(self, deadline: float) -> bytes | None:
        """The next message with its length; None at the end, which is also one that is too long."""
        header = self._take(4, deadline)
        if header is None:
            return None
        if header == _NO_LENGTH:
            rest = self._take_all(deadline)
            for status in REPORTED:
                if _NO_LENGTH + rest == self.mark + status.encode():
                    self.status = status
            return None
        (size,) = struct.unpack(">I", header)
        content = self._take(size, deadline) if size <= MESSAGE_BYTES else None
        return None if content is None else header + content

    def send(self, message: bytes, deadline: float) -> None:
        """Send a message. One that has ended does not get it."""
        stream = self.stdin.fileno()
        os.set_blocking(stream, False)
        with suppress(BrokenPipeError):
            while message:
                _wait_for(stream, select.POLLOUT, deadline)
                with suppress(BlockingIOError):
                    message = message[os.write(stream, message) :]

    def ending(self) -> Status:
        """How a process ended that reported nothing."""
        return "memory" if self.process.returncode in KILLED else "killed"

    def _take(self, size: int, deadline: float) -> bytes | None:
        while len(self._buffer) < size:
            _wait_for(self.stdout.fileno(), select.POLLIN, deadline)
            chunk = os.read(self.stdout.fileno(), 65536)
            if not chunk:
                return None
            self._buffer += chunk
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def _take_all(self, deadline: float) -> bytes:
        while len(self._buffer) < 256:
            _wait_for(self.stdout.fileno(), select.POLLIN, deadline)
            chunk = os.read(self.stdout.fileno(), 256)
            if not chunk:
                break
            self._buffer += chunk
        return bytes(self._buffer)


class Output:
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

    @property
    def text(self) -> str:
        return self.head.decode(errors="replace")

    def _read(self) -> None:
        with suppress(ValueError):  # closed, since a process that survived holds the other end
            while chunk := os.read(self._stream.fileno(), 65536):
                self.head += chunk[: self._limit - len(self.head)]
                self.tail = (self.tail + chunk)[-256:]
                self.total += len(chunk)
                self.first.set()
        self.first.set()


@contextmanager
def sandbox_process(backend: Backend, limits: Limits) -> Iterator[SandboxProcess]:
    """A process that has not got its code yet."""
    with _empty_directory() as directory:
        launch = backend(directory, limits)
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
                one = SandboxProcess(process, limits)
                with suppress(BrokenPipeError):
                    one.stdin.write(framed(_limits(launch)))
                yield one
            finally:
                end(process)
                with suppress(BrokenPipeError):
                    one.stdin.close()


def _limits(launch: Launch) -> dict[str, object]:
    filters = (
        {"own": seccomp_filter(has_pid_namespace=True).hex(), "host": seccomp_filter(has_pid_namespace=False).hex()}
        if launch.is_confined
        else None
    )
    return {"uid": launch.uid, "filters": filters, "rlimits": launch.rlimits}


def framed(message: object) -> bytes:
    content = json.dumps(message).encode()
    return struct.pack(">I", len(content)) + content


def start_error(backend: str, stderr: Output) -> Z2aError:
    return Z2aError(f"the sandbox ({backend}) did not start: {stderr.text.strip()[-500:] or 'no message'}")


def ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its group. SIGTERM first: the process of sandlock then ends those that left the group."""
    if process.poll() is None:
        process.terminate()
        if not ends_within(process, GRACE_SECONDS):
            process.kill()
            process.wait()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _wait_for(stream: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(stream, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


@contextmanager
def _empty_directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="z2a-sandbox-"))
    try:
        yield directory
    finally:
        # rm: directories that code has nested a thousand deep are too deep for Python's own recursion.
        subprocess.run(["rm", "-rf", "--", str(directory)], check=False, stderr=subprocess.DEVNULL)


BackendName = Literal["sandlock", "bubblewrap", "none"]
BACKENDS: dict[BackendName, Backend] = {"sandlock": sandlock, "bubblewrap": bubblewrap, "none": unconfined}
DEFAULT_LIMITS = Limits()
_ENDED = framed({"failed": "its process ended or sent too much"})


@dataclass(frozen=True)
class CodeResult:
    """How code ended."""

    status: Status
    """``ok``: it ran to its last line. ``failed``: an exception, also ``SystemExit``. ``timeout``. ``memory``: an
    allocation failed, or SIGKILL, by which sandlock and the kernel end processes that use too much. ``killed``: the
    process ended in another way, by a signal or by ``os._exit``. ``unsupported``: tests need more than plain data."""
    stdout: str
    """Empty after :meth:`Sandbox.run_tests`."""
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

        The status is what the code says of itself, and hostile code can forge it: grade with :meth:`run_tests`.

        >>> open_sandbox().run_python("print(1 + 1)").stdout
        '2\\n'
        """
        with sandbox_process(BACKENDS[self.backend], self.limits) as one:
            stdout = Output(one.stdout, self.limits.output + len(one.mark))
            one.start({"role": "script", "code": code})
            stdout.first.wait(START_SECONDS)  # the backend's time does not count
            started = time.monotonic()
            timed_out = not ends_within(one.process, self.limits.seconds)
            seconds = time.monotonic() - started
            end(one.process)
            stdout.join(GRACE_SECONDS)
            one.stderr.join(GRACE_SECONDS)
        if not stdout.head.startswith(one.mark):
            raise start_error(self.backend, one.stderr)
        status, size = ("timeout" if timed_out else one.ending()), stdout.total
        for reported in REPORTED if not timed_out else ():
            trailer = one.mark + reported.encode()
            if stdout.tail.endswith(trailer):
                status, size = reported, stdout.total - len(trailer)
        return CodeResult(status, stdout.head[len(one.mark) : size].decode(errors="replace"), one.stderr.text, seconds)

    def run_tests(self, answer: str, tests: str, function: str, context: str = "") -> CodeResult:
        """Test a function of an answer: the answer runs in one sandbox, the tests in a different one.

        The tests call ``function``, and the call runs in the answer's process. Only plain data crosses: None, numbers,
        strings, bytes, and lists, tuples, sets and dicts of them. Tests that pass or get anything else end as
        ``unsupported``. ``context`` runs in the process of the tests, before them: helper functions that they use.

        >>> open_sandbox().run_tests("def double(x): return 2 * x", "assert double(2) == 4", "double").status
        'ok'
        """
        backend = BACKENDS[self.backend]
        with sandbox_process(backend, self.limits) as answering, sandbox_process(backend, self.limits) as testing:
            answering.start({"role": "answer", "code": answer, "function": function})
            testing.start({"role": "tests", "code": tests, "function": function, "context": context})
            answering.wait_ready(self.backend)
            testing.wait_ready(self.backend)
            started = time.monotonic()
            status: Status | None = None
            try:
                _exchange(testing, answering, started + self.limits.seconds)
            except TimeoutError:
                status = "timeout"
            seconds = time.monotonic() - started
            for one in (testing, answering):
                end(one.process)
                one.stderr.join(GRACE_SECONDS)
        status = status or testing.status or testing.ending()
        return CodeResult(status, "", answering.stderr.text + testing.stderr.text, seconds)


def _exchange(testing: SandboxProcess, answering: SandboxProcess, deadline: float) -> None:
    """Pass calls and results on, until the tests end."""
    while (call := testing.receive(deadline)) is not None:
        answering.send(call, deadline)
        testing.send(answering.receive(deadline) or _ENDED, deadline)


def open_sandbox(limits: Limits = DEFAULT_LIMITS, *, unsafe: bool = False) -> Sandbox:
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
