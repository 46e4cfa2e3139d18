"""How every program for untrusted input starts: limits first, then the program, for ``limited_process``.

It imports nothing of zero2all, so that it starts quickly and its memory limit is the program's.
"""

from __future__ import annotations

import importlib.util
import resource
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


def main() -> None:
    path, descriptor, seconds, memory, *words = sys.argv[1:]
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
