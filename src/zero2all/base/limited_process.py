"""Code that nobody should run on untrusted input in their own process runs in a child process.

The child has limits on CPU time and memory, no credentials in its environment, and no open file but its connection.
It ends when this process does: its standard input is a pipe from here that nobody writes to, and the kernel signals
the child when the pipe is closed.

The child runs this file as a script, which sets the limits and then runs the program. It imports nothing of zero2all,
so that it starts quickly and its memory limit is the program's.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ENVIRONMENT = ("PATH", "HOME", "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "LD_LIBRARY_PATH", "LIBARCHIVE")
EXIT_SECONDS = 10.0  # for a child to end by itself


class LimitedProcess:
    """A child process that runs ``main(connection, *words)`` of a program; messages are bytes."""

    def __init__(self, program: Path, words: Sequence[object], seconds: int, memory: int) -> None:
        """``seconds`` of CPU time in all; with 0 the program has to limit its tasks itself."""
        self.is_late = False
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-B", __file__, program, theirs.fileno(), seconds, memory, *words]
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        with theirs:
            try:
                self._process = subprocess.Popen(
                    list(map(str, command)),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**environment, "LC_CTYPE": "C.UTF-8"},
                    process_group=0,  # Ctrl-C is this process's to handle
                )
            except OSError as error:  # not the input's fault
                from zero2all.base.errors import Z2aError  # not in the child

                ours.close()
                raise Z2aError(f"cannot start a process for {program.stem}: {error.strerror}") from error
        self.connection: Connection[Any, Any] = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    def receive(self, deadline: float, most: int) -> bytes:
        """The next message, of up to ``most`` bytes.

        Raises ``EOFError`` or ``OSError`` if the child ends instead, as it must at the deadline.
        """
        if not self.connection.poll(max(0.0, deadline - time.monotonic())):
            self.is_late = True
            self._process.kill()
        return self.connection.recv_bytes(most)

    def disconnect(self) -> None:
        """Close what connects the child to this process, but leave it running: for a forked process."""
        self.connection.close()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        self._process.kill()
        self.disconnect()
        self._process.wait()

    def exit_reason(self) -> str:
        """Why it ended; empty if its time was up."""
        self.connection.close()  # it has nothing left to wait for
        try:
            status = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self.disconnect()
        if self.is_late or status == -signal.SIGXCPU:
            return ""
        return signal.Signals(-status).name if status < 0 else f"status {status}"


def limit_resources(seconds: int, memory: int) -> None:
    """Limit this process for good: the kernel ends it if it computes for longer; it can write to no file.

    Without ``seconds`` the program limits the CPU time of each of its tasks itself.
    """
    limits = {resource.RLIMIT_AS: (memory, memory), resource.RLIMIT_FSIZE: (0, 0), resource.RLIMIT_CORE: (0, 0)}
    if seconds:
        limits[resource.RLIMIT_CPU] = (seconds, seconds + 5)  # first by SIGXCPU, which tells the reason
    for kind, values in limits.items():
        with suppress(ValueError, OSError):  # not on every system
            resource.setrlimit(kind, values)


def end_with_parent() -> None:
    """Let the kernel end this process when the pipe at its standard input is closed, whatever it computes then."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(0, 0)
    if poll.poll(0):  # closed before the kernel was asked
        sys.exit()


def main() -> None:
    path, descriptor, seconds, memory, *words = sys.argv[1:]
    end_with_parent()
    limit_resources(int(seconds), int(memory))
    spec = importlib.util.spec_from_file_location("program", path)
    assert spec is not None
    assert spec.loader is not None
    program = sys.modules["program"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    with Connection(int(descriptor)) as connection, suppress(EOFError, BrokenPipeError):
        program.main(connection, *words)


if __name__ == "__main__":
    main()
