"""How code is confined: a command that runs Python with a program, under sandlock, under bubblewrap, or as it is."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MIB = 2**20
PidNamespace = Literal["own", "host"]
SYSTEM_LIBRARIES = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


@dataclass(frozen=True)
class Limits:
    """What code may use."""

    seconds: float = 10.0
    memory: int = 512 * MIB
    """Bytes of address space of a process; with sandlock also of all processes together."""
    processes: int = 16
    disk: int = 64 * MIB
    """Bytes of files in the temporary directory, the only place to write to."""
    output: int = 64 * 1024
    """Bytes of stdout and of stderr that are kept."""


@dataclass(frozen=True)
class Launch:
    """A command that runs :mod:`zero2all.sandbox.child`."""

    command: list[str]
    env: dict[str, str] | None
    """None: the one of this process; the backend cleans it for the code."""
    rlimits: dict[str, int]
    uid: int | None = None
    """The user that the child changes to."""
    is_confined: bool = True
    """Whether the child installs a system call filter and refuses to be root."""


Backend = Callable[[Path, Limits], Launch]


def child_command() -> list[str]:
    """Python without a virtual environment: the standard library is all that the code can import.

    Takes a :data:`PidNamespace` as its last argument.
    """
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    return [python, "-I", "-S", "-c", Path(__file__).with_name("child.py").read_text(encoding="utf-8")]


def clean_env(directory: str) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8"}


def base_rlimits(limits: Limits) -> dict[str, int]:
    return {
        "RLIMIT_AS": limits.memory,
        "RLIMIT_CPU": int(limits.seconds) + 2,
        "RLIMIT_FSIZE": limits.disk // 4,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }


def sandlock(directory: Path, limits: Limits) -> Launch:
    """Landlock and seccomp, and a PID namespace where the kernel gives one; needs neither root nor namespaces."""
    work, layer = directory / "work", directory / "layer"
    work.mkdir()
    layer.mkdir()
    policy: dict[str, object] = {
        "fs_readable": [sys.base_prefix, *filter(os.path.exists, (*SYSTEM_LIBRARIES, *DEVICES))],
        "fs_writable": [str(work)],
        "workdir": str(work),  # writes go to the layer, whose size is limited
        "fs_storage": str(layer),
        "max_disk": limits.disk,
        "cwd": str(work),
        "max_memory": limits.memory + 64 * MIB,  # above RLIMIT_AS, so that one process gets a MemoryError
        "max_processes": limits.processes + 1,  # the one that reports
        "clean_env": True,
        "env": clean_env(str(work)),
        "no_coredump": True,
    }
    if os.geteuid() == 0:
        policy |= {"uid": 65534, "gid": 65534}  # in a user namespace: without capabilities
    arguments = {"parent": os.getpid(), "policy": policy, "command": child_command()}
    command = [sys.executable, "-m", "zero2all.sandbox.sandlock_process", json.dumps(arguments)]
    return Launch(command, None, base_rlimits(limits))


def bubblewrap(directory: Path, limits: Limits) -> Launch:
    """Namespaces: of users, or with root without them."""
    is_root = os.geteuid() == 0
    command = ["bwrap", "--die-with-parent", "--clearenv"]
    command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    # A limit of processes does not hold for root of the host, whatever it is called in a user namespace.
    privileges = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    command += privileges if is_root else ["--unshare-user", "--cap-drop", "ALL"]
    command += ["--perms", "1777", "--size", str(limits.disk), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    # bwrap would create these so that only root can enter them.
    for parent in (Path("/dev"), *list(Path(sys.base_prefix).parents)[-2::-1]):
        command += ["--dir", str(parent)]
    # Neither /proc, where process 1 shows its environment, nor /dev, whose tmpfs has no limit.
    for path in SYSTEM_LIBRARIES:
        command += ["--ro-bind-try", path, path]
    command += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    for path in DEVICES:
        command += ["--dev-bind", path, path]
    command += ["--remount-ro", "/"]
    for name, value in clean_env("/tmp").items():
        command += ["--setenv", name, value]
    uid = 10**9 + secrets.randbelow(10**9) if is_root else None  # nobody else's: only these processes are counted
    rlimits = base_rlimits(limits) | {"RLIMIT_NPROC": limits.processes + 1}
    return Launch([*command, *child_command(), "own"], clean_env("/"), rlimits, uid)


def unconfined(directory: Path, limits: Limits) -> Launch:
    """The limits of the system alone: code can read and delete what the user can, and use the network."""
    return Launch([*child_command(), "host"], clean_env(str(directory)), base_rlimits(limits), is_confined=False)
