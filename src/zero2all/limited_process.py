"""Code that nobody should run on untrusted input in their own process runs in a child process.

The child has limits on CPU time and memory, no credentials in its environment, and no open file but its connection.
It ends when this process does: its standard input is a pipe from here that nobody writes to, and the kernel signals
the child when the pipe is closed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from zero2all import limited_child
from zero2all.errors import Z2aError

ENVIRONMENT = ("PATH", "HOME", "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "LD_LIBRARY_PATH", "LIBARCHIVE")
EXIT_SECONDS = 10.0  # for a child to end by itself


class LimitedProcess:
    """A child process that runs ``main(connection, *words)`` of a program; messages are bytes."""

    def __init__(self, program: Path, words: Sequence[object], seconds: int, memory: int) -> None:
        """``seconds`` of CPU time in all; with 0 the program has to limit its tasks itself."""
        self.is_late = False
        ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-P",
            "-B",
            limited_child.__file__,
            program,
            theirs.fileno(),
            seconds,
            memory,
            *words,
        ]
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
