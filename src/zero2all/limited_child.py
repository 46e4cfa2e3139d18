"""How every program for untrusted input starts: limits first, then the program, for ``limited_process``.

It imports nothing of zero2all, so that it starts quickly and its memory limit is the program's.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import resource
import select
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection


def limit_resources(seconds: int, memory: int) -> None:
    """Of this process, for good: the kernel ends it if it computes for longer; it can write to no file.

    Without ``seconds`` the program limits the CPU time of each of its tasks itself.
    """
    limits = {
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_CORE: (0, 0),
    }
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
