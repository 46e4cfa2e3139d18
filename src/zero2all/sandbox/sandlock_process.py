"""Processes between the harness and code under sandlock: they end every process of the code, also detached ones.

sandlock kills a process group, which a process can leave. Here the code has a PID namespace, which ends with its first
process. Where the kernel gives none, orphans become children of the first process here, which kills them.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from zero2all.base.errors import need
from zero2all.sandbox.backends import PidNamespace

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNS = 0x10000000, 0x20000000, 0x20000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 1 << 14, 1 << 18
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    arguments = json.loads(sys.argv[1])
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, _interrupt)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != arguments["parent"]:
        sys.exit("the parent has died")
    try:
        exit_code = _in_namespace(arguments)
        if exit_code is None:
            exit_code = run(arguments["policy"], arguments["command"], "host")
    finally:
        kill_children()
    sys.exit(exit_code)


def _in_namespace(arguments: dict[str, Any]) -> int | None:
    """The exit code of the command in a PID namespace; None if there can be none."""
    is_ready, ready = os.pipe()
    outer = os.fork()
    if outer == 0:
        os.close(is_ready)
        _enter(arguments, ready)
    os.close(ready)
    if os.read(is_ready, 1):
        return os.waitstatus_to_exitcode(os.waitpid(outer, 0)[1])
    os.waitpid(outer, 0)
    return None


def _enter(arguments: dict[str, Any], ready: int) -> NoReturn:
    """Run the command in a child that is the first process of a PID namespace, and wait for it."""
    exit_code = 1
    try:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _unshare()
        first = os.fork()
        if first:
            os.close(ready)
            exit_code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
            os._exit(exit_code if exit_code >= 0 else 128 - exit_code)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _mount_proc()
    except OSError:
        os._exit(exit_code)
    try:
        os.write(ready, b"1")
        os.close(ready)
        exit_code = run(arguments["policy"], arguments["command"], "own")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(exit_code)


def _unshare() -> None:
    uid, gid = os.geteuid(), os.getegid()
    _check(_LIBC.unshare((_CLONE_NEWUSER if uid else 0) | _CLONE_NEWPID | _CLONE_NEWNS))
    if uid:  # the same ids: the program that sandlock starts then has no capabilities
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")


def _mount_proc() -> None:
    """sandlock reads the memory of its processes there, by their pids."""
    _check(_LIBC.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _check(_LIBC.mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None))


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def run(policy: dict[str, Any], command: Sequence[str], pid_namespace: PidNamespace) -> int:
    """Run a command under sandlock."""
    sandlock = need("sandlock", "evals")
    warnings.simplefilter("ignore")  # of sandlock; stderr belongs to the code
    name = f"z2a-{secrets.token_hex(8)}"  # the default has the pid, which is 1 in every namespace
    sandbox = sandlock.Sandbox(**policy, name=name, on_exit="abort", on_error="abort")
    process = sandbox.popen([*command, pid_namespace])
    waiter = threading.Thread(target=process.wait, daemon=True)
    waiter.start()
    waiter.join()  # unlike the wait itself, it ends when a signal arrives
    result = process.wait()
    if result.reason == sandlock.ExitReason.EXITED:
        return int(result.exit_code)
    return 128 + (result.signal if result.reason == sandlock.ExitReason.SIGNALED else signal.SIGKILL)


def kill_children() -> None:
    """Kill and reap children, and their children, which are children of this process once their parent is dead."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while pids := _children():
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass  # the waiting thread was first


def _children() -> list[int]:
    own = str(os.getpid())
    pids: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if fields[1] == own:
            pids.append(int(stat.parent.name))
    return pids


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
