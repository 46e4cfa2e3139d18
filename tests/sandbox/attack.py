"""Tries every system call that takes a process, user or group on a process outside the sandbox.

``python -m tests.sandbox.attack BACKEND own|host``: prints a JSON object with what the calls returned, and the state of
the victim before and after. ``host``: as on a kernel that gives no PID namespace. A program, so that a test can run it
as a different user. Imports nothing but the standard library and ``zero2all.sandbox``.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from zero2all.sandbox import Limits, Sandbox, sandbox
from zero2all.sandbox.backends import Launch, sandlock
from zero2all.sandbox.seccomp import system_calls

# V: the pid of the victim. F: a pidfd of it, if there is one. P: a readable pipe. B(n): n zero bytes. I(...): integers.
ARGUMENTS = {
    "add_key": "(b'user', b'z2a', b'x', 1, -3)",
    "bpf": "(0, B(128), 128)",
    "capget": "(I(0x20080522, V), B(24))",
    "capset": "(I(0x20080522, V), B(24))",
    "chown": "(b'.', 0, 0)",
    "clock_adjtime": "(~V << 3 | 2, B(256))",
    "clock_getres": "(~V << 3 | 2, B(16))",
    "clock_gettime": "(~V << 3 | 2, B(16))",
    "clock_nanosleep": "(~V << 3 | 2, 0, B(16), 0)",
    "clock_settime": "(~V << 3 | 2, B(16))",
    "clone": "(0x10000000 | 0x20000000 | 17, 0, 0, 0, 0)",
    "clone3": "(B(88), 88)",
    "fchown": "(P, 0, 0)",
    "fchownat": "(-100, b'.', 0, 0, 0)",
    "fcntl": "(P, 8, V)",
    "get_robust_list": "(V, B(8), B(8))",
    "getpgid": "(V,)",
    "getpriority": "(0, V)",
    "getsid": "(V,)",
    "io_uring_enter": "(-1, 0, 0, 0, 0, 0)",
    "io_uring_register": "(-1, 0, 0, 0)",
    "io_uring_setup": "(8, B(256))",
    "ioctl": "(P, 0x8901, I(V))",
    "ioprio_get": "(1, V)",
    "ioprio_set": "(1, V, 3 << 13)",
    "kcmp": "(V, V, 0, 0, 0)",
    "keyctl": "(0, -3, 0)",
    "kill": "(V, 9)",
    "lchown": "(b'.', 0, 0)",
    "migrate_pages": "(V, 8, I(1, 0), I(1, 0))",
    "move_pages": "(V, 1, I(4096, 0), I(0), B(8), 2)",
    "msgctl": "(0, 1, B(256))",
    "name_to_handle_at": "(F, b'', I(128, *[0] * 40), B(4), 0x1000)",
    "open_by_handle_at": "(F, I(8, 1, V, 0), 0)",
    "perf_event_open": "(I(1, 128, *[0] * 40), V, -1, -1, 0)",
    "pidfd_getfd": "(F, 0, 0)",
    "pidfd_open": "(V, 0)",
    "pidfd_send_signal": "(F, 9, 0, 0)",
    "prctl": "(62, 2, V, 0, 0)",
    "prlimit64": "(V, 0, I(1, 0, 1, 0), 0)",
    "process_madvise": "(F, I(4096, 0, 4096, 0), 1, 20, 0)",
    "process_mrelease": "(F, 0)",
    "process_vm_readv": "(V, I(0, 0, 0, 0), 1, I(0, 0, 0, 0), 1, 0)",
    "process_vm_writev": "(V, I(0, 0, 0, 0), 1, I(0, 0, 0, 0), 1, 0)",
    "ptrace": "(16, V, 0, 0)",
    "quotactl": "(0x800002, b'/', 0, B(8))",
    "quotactl_fd": "(P, 0x800002, 0, B(8))",
    "request_key": "(b'user', b'z2a', 0, -3)",
    "rt_sigqueueinfo": "(V, 9, I(9, 0, -1, *[0] * 40))",
    "rt_tgsigqueueinfo": "(V, V, 9, I(9, 0, -1, *[0] * 40))",
    "sched_getaffinity": "(V, 128, B(128))",
    "sched_getattr": "(V, B(64), 64, 0)",
    "sched_getparam": "(V, B(8))",
    "sched_getscheduler": "(V,)",
    "sched_rr_get_interval": "(V, B(16))",
    "sched_setaffinity": "(V, 8, I(1, 0))",
    "sched_setattr": "(V, I(48, 3, *[0] * 14), 0)",
    "sched_setparam": "(V, B(8))",
    "sched_setscheduler": "(V, 3, B(8))",
    "semctl": "(0, 0, 1, B(256))",
    "sendmmsg": "(-1, 0, 0, 0)",
    "sendmsg": "(-1, 0, 0)",
    "setfsgid": "(0,)",
    "setfsuid": "(0,)",
    "setgid": "(0,)",
    "setgroups": "(1, I(0))",
    "setns": "(F, 0x20000000)",
    "setpgid": "(V, 0)",
    "setpriority": "(0, V, 19)",
    "setregid": "(0, 0)",
    "setresgid": "(0, 0, 0)",
    "setresuid": "(0, 0, 0)",
    "setreuid": "(0, 0)",
    "setuid": "(0,)",
    "shmctl": "(0, 1, B(256))",
    "tgkill": "(V, V, 9)",
    "timer_create": "(~V << 3 | 2, 0, B(8))",
    "tkill": "(V, 9)",
    "unshare": "(0x10000000,)",
    "wait4": "(V, 0, 1, 0)",
    "waitid": "(1, V, B(128), 5, 0)",
    # Of the caller: nothing to attack.
    "getgroups": "(0, 0)",
    "getresgid": "(B(4), B(4), B(4))",
    "getresuid": "(B(4), B(4), B(4))",
    "getrusage": "(0, B(256))",
    # Variants
    "kill 1": "(-1, 0)",
    "setpriority user": "(2, 0, 19)",
    "ioprio_set user": "(3, 0, 3 << 13)",
    "prlimit64 read": "(V, 0, 0, B(16))",
    "fcntl F_SETOWN_EX": "(P, 15, I(1, V))",
    "inotify_add_watch": "(3, b'/tmp', 2)",
    "inotify_init1": "(0,)",
    "socket netlink": "(16, 3, 0)",
    "statfs": "(b'/', B(256))",
}
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
