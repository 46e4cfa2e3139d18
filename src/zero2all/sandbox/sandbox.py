"""Run code in a sandbox, and say how it ended."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from zero2all.errors import UsageError, Z2aError
from zero2all.sandbox.backends import Backend, Limits, bubblewrap, sandlock, unconfined
from zero2all.sandbox.processes import (
    GRACE_SECONDS,
    REPORTED,
    START_SECONDS,
    Output,
    SandboxProcess,
    Status,
    end,
    ends_within,
    framed,
    sandbox_process,
    start_error,
)

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
            stdout.first.wait(START_SECONDS)  # the time of the backend is not that of the code
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
