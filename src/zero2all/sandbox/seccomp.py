"""Which system calls code in the sandbox may make, and the filter that the child installs: classic BPF.

``system_calls.tsv`` lists every system call of the kernel and the identities that it takes: processes, users, groups.
Each of those has a rule here. Calls without a rule are allowed: the backend confines files and networks.
"""

from __future__ import annotations

import csv
import errno
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from zero2all.base.errors import Z2aError

MACHINES = ("x86_64", "aarch64")
_MAX = 2**32 - 1

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

Instruction = tuple[int, int, int, int]


@cache
def seccomp_filter(*, has_pid_namespace: bool, machine: str = platform.machine()) -> bytes:
    """The filter for a machine."""
    if machine not in MACHINES:
        raise Z2aError(f"the sandbox has no system call numbers of {machine}, only of {' and '.join(MACHINES)}")
    numbers = {call.name: call.numbers[machine] for call in system_calls() if machine in call.numbers}
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        (_JUMP_ABOVE, 0, 1, max(numbers.values())),  # of a newer kernel: nobody has looked at what it takes
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for name, rule in RULES.items():
        if name in numbers:
            block = _block(rule, has_pid_namespace=has_pid_namespace)
            program += [(_JUMP_EQUAL, 0, len(block), numbers[name]), *block]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _block(rule: Rule, *, has_pid_namespace: bool) -> list[Instruction]:
    checks = rule.namespaced if has_pid_namespace else rule.checks
    denied = (_RETURN, 0, 0, _ERRNO | rule.error)
    if checks is None:
        return [denied]
    return [*(one for check in checks for one in _checked(check, denied)), (_RETURN, 0, 0, _ALLOW)]


def _checked(check: Check, denied: Instruction) -> list[Instruction]:
    """Continues behind the last instruction if the check holds."""
    block: list[Instruction] = [(_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * check.argument)]  # the low half: little-endian
    if check.forbidden_bits:
        block += [(_JUMP_ANY_BIT, 0, 1, check.forbidden_bits), denied]
    for index, (low, high) in enumerate(check.ranges):
        rest = 2 * (len(check.ranges) - index - 1) + 1
        block += [(_JUMP_AT_LEAST, 0, 1, low), (_JUMP_ABOVE, 0, rest, high)]
    return [*block, denied]


@dataclass(frozen=True)
class Check:
    """What the low 32 bits of an argument may be. The kernel ignores the rest of all arguments that are checked."""

    argument: int
    ranges: tuple[tuple[int, int], ...] = ((0, _MAX),)
    """Values, with both ends; in order."""
    forbidden_bits: int = 0


Checks = tuple[Check, ...]


@dataclass(frozen=True)
class Rule:
    """When a system call is allowed: if all checks hold. ``None``: never."""

    reason: str
    checks: Checks | None
    namespaced: Checks | None
    """The same in a PID namespace, where only processes of the sandbox have a pid."""
    error: int = errno.EPERM


def _allow(reason: str) -> Rule:
    return Rule(reason, (), ())


def _deny(reason: str, error: int = errno.EPERM) -> Rule:
    return Rule(reason, None, None, error)


def _only(reason: str, *checks: Check) -> Rule:
    return Rule(reason, checks, checks)


def _namespace(reason: str, *checks: Check, always: Checks = ()) -> Rule:
    """Allowed in a PID namespace; without one only if the checks hold."""
    return Rule(reason, (*always, *checks), always)


def _is(argument: int, value: int) -> Check:
    return Check(argument, ((value, value),))


def _is_not(argument: int, *values: int) -> Check:
    edges = [-1, *sorted(values), _MAX + 1]
    return Check(argument, tuple((low + 1, high - 1) for low, high in pairwise(edges)))


_OWN = _is(0, 0)  # pid 0 is the caller
_CLOCK = Check(0, ((0, 2**31 - 1), (2**32 - 8, _MAX)))  # -8 to -1: the caller; below: ~pid << 3
_F_SETOWN, _F_SETOWN_EX = 8, 15
_FIOSETOWN, _SIOCSPGRP, _TIOCSPGRP = 0x8901, 0x8902, 0x5410
_PR_SCHED_CORE = 62
_PRIO_PROCESS, _IOPRIO_WHO_PROCESS = 0, 1
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEW*
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10

_TABLE: tuple[tuple[Rule, str], ...] = (
    # Limits and priorities
    (_only("sets limits, which can end a process", _OWN), "prlimit64"),
    (_namespace("reads or changes a priority", _is(1, 0), always=(_is(0, _PRIO_PROCESS),)), "getpriority setpriority"),
    (_namespace("reads or changes a priority", _is(1, 0), always=(_is(0, _IOPRIO_WHO_PROCESS),)),
     "ioprio_get ioprio_set"),
    (_namespace("reads or changes the scheduling of a process", _OWN),
     "sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity "
     "sched_setattr sched_setparam sched_setscheduler"),
    (_allow("of the caller and its children"), "getrusage"),
    # Signals and process groups
    (_namespace("signals a process", _OWN), "kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo"),
    (_namespace("the handle takes signals", _OWN), "pidfd_open"),
    (Rule("a pidfd comes from pidfd_open", None, ()), "pidfd_send_signal"),
    (_namespace("shows that a process exists", _OWN), "getpgid getsid"),
    (_namespace("children only, but shows that a process exists", _OWN), "setpgid"),
    (_allow("children only"), "wait4 waitid"),
    (_only("F_SETOWN: the kernel signals a process", _is_not(1, _F_SETOWN, _F_SETOWN_EX)), "fcntl"),
    (_only("the kernel signals a process or group", _is_not(1, _FIOSETOWN, _SIOCSPGRP, _TIOCSPGRP)), "ioctl"),
    # Inspection of processes
    (_deny("reads or changes the memory, files or speed of a different process"),
     "bpf kcmp perf_event_open pidfd_getfd process_madvise process_mrelease process_vm_readv process_vm_writev ptrace"),
    (_only("shows addresses of a process", _OWN), "get_robust_list"),
    (_only("moves the memory of a process", _OWN), "migrate_pages move_pages"),
    (_only("PR_SCHED_CORE: changes where a process runs", _is_not(0, _PR_SCHED_CORE)), "prctl"),
    (_namespace("negative clocks are the CPU time of a process", _CLOCK),
     "clock_getres clock_gettime clock_nanosleep timer_create"),  # timers signal only threads of the caller
    (_deny("the time of the system"), "clock_adjtime clock_settime"),
    (_deny("handles of files and processes"), "name_to_handle_at open_by_handle_at"),
    # Users, groups, capabilities
    (_deny("the sandbox has one user"),
     "capget capset quotactl quotactl_fd setfsgid setfsuid setgid setgroups setregid setresgid setresuid setreuid "
     "setuid"),
    (_allow("of the caller"), "getgroups getresgid getresuid"),
    (_deny("keys belong to a user, not to a process"), "add_key keyctl request_key"),
    (_allow("SCM_CREDENTIALS: the kernel checks them"), "sendmsg sendmmsg"),
    # Namespaces, in which further file systems can be mounted
    (_only("makes a namespace", Check(0, forbidden_bits=_NEW_NAMESPACES)), "clone"),
    (_deny("the flags are in memory, which a filter cannot read; C libraries then use clone", errno.ENOSYS), "clone3"),
    (_deny("enters or makes a namespace"), "setns unshare"),
    # Past the filter, past the limits
    (_deny("requests skip the filter", errno.ENOSYS), "io_uring_enter io_uring_register io_uring_setup"),
    (_deny("memory that counts for no process"),
     "memfd_create memfd_secret mq_open msgctl msgget semctl semget shmctl shmget"),
    # Files and networks
    (_deny("Landlock has no rule for it"),
     "chmod fchmod fchmodat fchmodat2 chown fchown fchownat lchown utime utimes futimesat utimensat setxattr lsetxattr "
     "fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat file_setattr statfs fstatfs"),
    (_deny("sees what happens to files outside"),
     "fanotify_init fanotify_mark inotify_add_watch inotify_init inotify_init1"),
    (_only("netlink and packet sockets show the network of the machine",
           Check(0, ((_AF_UNIX, _AF_INET), (_AF_INET6, _AF_INET6)))), "socket"),
)  # fmt: skip
RULES: Mapping[str, Rule] = {name: rule for rule, names in _TABLE for name in names.split()}


@dataclass(frozen=True)
class SystemCall:
    """A line of ``system_calls.tsv``."""

    name: str
    numbers: Mapping[str, int]
    """The number on each machine that has the call."""
    arguments: tuple[str, ...]
    identities: str
    """What it takes of processes, users and groups; empty: nothing."""


@cache
def system_calls() -> tuple[SystemCall, ...]:
    with Path(__file__).with_name("system_calls.tsv").open(encoding="utf-8", newline="") as file:
        return tuple(
            SystemCall(
                row["name"],
                {machine: int(row[machine]) for machine in MACHINES if row[machine] != "-"},
                tuple(row["arguments"].split("; ")) if row["arguments"] != "-" else (),
                row["identities"] if row["identities"] != "-" else "",
            )
            for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        )
