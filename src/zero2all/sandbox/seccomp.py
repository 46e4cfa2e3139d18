"""A system call filter that the child installs: classic BPF, in the form of the kernel."""

from __future__ import annotations

import errno
import platform
import struct
from functools import cache

from zero2all.errors import Z2aError
from zero2all.sandbox.system_call_rules import MACHINES, RULES, Check, Rule, system_calls

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

Instruction = tuple[int, int, int, int]


@cache
def seccomp_filter(has_pid_namespace: bool, machine: str = platform.machine()) -> bytes:
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
            block = _block(rule, has_pid_namespace)
            program += [(_JUMP_EQUAL, 0, len(block), numbers[name]), *block]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _block(rule: Rule, has_pid_namespace: bool) -> list[Instruction]:
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
