"""A system call filter that the child installs: classic BPF, in the form of the kernel."""

from __future__ import annotations

import errno
import platform
import struct

from zero2all.errors import Z2aError

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# memfd_create, memfd_secret, shmget, msgget: memory that counts for no process.
# unshare, setns: namespaces, in which further file systems can be mounted.
# chmod, chown, utime, setxattr, removexattr and their variants, file_setattr: Landlock has no rule for them.
_DENIED = {
    "x86_64": (
        *(319, 447, 29, 68, 272, 308),
        *(90, 91, 268, 452, 92, 93, 94, 260, 132, 235, 261, 280, 188, 189, 190, 463, 197, 198, 199, 466, 469),
    ),
    "aarch64": (
        *(279, 447, 194, 186, 97, 268),
        *(52, 53, 452, 54, 55, 88, 5, 6, 7, 463, 14, 15, 16, 466, 469),
    ),
}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEW*
_X32 = 0x40000000

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def seccomp_filter() -> bytes:
    """The filter for this machine."""
    machine = platform.machine()
    if machine not in _DENIED:
        raise Z2aError(f"the sandbox has no system call numbers of {machine}, only of {' and '.join(_DENIED)}")
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for number in _DENIED[machine]:
        program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    # The flags of clone3 are in memory, which a filter cannot read; C libraries then use clone.
    program += [(_JUMP_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    program += [
        (_JUMP_EQUAL, 0, 3, _CLONE[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
