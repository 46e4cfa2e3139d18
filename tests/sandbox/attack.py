"""Tries every system call that takes a process, user or group on a process outside the sandbox.

``python -m tests.sandbox.attack BACKEND own|host``: prints a JSON object with what the calls returned, and the state of
the victim before and after. ``host``: as on a kernel that gives no PID namespace. A program, so that a test can run it
as a different user. Imports nothing but the standard library, this package and ``zero2all.sandbox``.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from tests.sandbox.make_system_calls import read_table

from zero2all.sandbox import Limits, Sandbox, sandbox
from zero2all.sandbox.backends import Launch, sandlock
from zero2all.sandbox.seccomp import system_calls

ARGUMENTS = read_table(Path(__file__).with_suffix(".tsv"))
CODE = """
import ctypes, json, os, struct
V = {victim}
libc = ctypes.CDLL(None, use_errno=True)
def B(size): return ctypes.create_string_buffer(size)
def I(*values): return ctypes.create_string_buffer(struct.pack(f"{{len(values)}}i", *values))
P, _ = os.pipe()
F = libc.syscall({pidfd_open}, V, 0)
returned = {{}}
for name, number, arguments in {calls!r}:
    result = libc.syscall(number, *eval(arguments))
    returned[name] = result if result >= 0 else -ctypes.get_errno()
print(json.dumps(returned))
"""


def code(victim: int, machine: str) -> str:
    numbers = {call.name: call.numbers[machine] for call in system_calls() if machine in call.numbers}
    calls = [
        (name, numbers[name.split()[0]], arguments)
        for name, arguments in ARGUMENTS.items()
        if name.split()[0] in numbers
    ]
    return CODE.format(victim=victim, calls=calls, pidfd_open=numbers["pidfd_open"])


def without_namespace(directory: Path, limits: Limits) -> Launch:
    launch = sandlock(directory, limits)
    program = "import zero2all.sandbox.sandlock_process as p; p._in_namespace = lambda arguments: None; p.main()"
    return Launch([sys.executable, "-c", program, launch.command[-1]], launch.env, launch.rlimits)


def state(pid: int) -> dict[str, object]:
    """What could have been changed of a process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return {
        "limits": [resource.prlimit(pid, number) for number in range(16)],
        "priority": os.getpriority(os.PRIO_PROCESS, pid),
        "affinity": sorted(os.sched_getaffinity(pid)),
        "scheduler": [os.sched_getscheduler(pid), fields[15], fields[16]],
        "group": [os.getpgid(pid), os.getsid(pid)],
        "status": [line for line in lines if line.startswith(("Uid", "Gid", "Groups", "SigP", "ShdPnd", "Tracer"))],
    }


def main() -> None:
    backend, namespace = sys.argv[1:]
    if namespace == "host":
        sandbox.BACKENDS["sandlock"] = without_namespace
    own = {"own priority": os.getpriority(os.PRIO_PROCESS, 0)}
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as victim:
        victim.stdout.readline()
        before = state(victim.pid) | own
        result = Sandbox(backend, Limits(seconds=30)).run_python(code(victim.pid, os.uname().machine))
        after = state(victim.pid) | {"own priority": os.getpriority(os.PRIO_PROCESS, 0)}
        victim.communicate(b"\n")
    returned = json.loads(result.stdout) if result.stdout else {}
    report = {"status": result.status, "errors": result.stderr, "returned": returned, "uid": os.getuid()}
    print(json.dumps(report | {"before": before, "after": after, "exit": victim.returncode}))  # noqa: T201


if __name__ == "__main__":
    main()
