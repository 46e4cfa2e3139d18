"""The program inside the sandbox: it limits itself and executes the code. Passed to Python as text, with ``-c``.

stdin has a JSON object. On stdout the output of the code is between two marks that the code does not know: without the
first the sandbox has failed, and without the last the code ended the process itself.
"""

import contextlib
import ctypes
import json
import os
import resource
import sys
import traceback
import types


def main() -> None:
    request = json.load(sys.stdin.buffer)
    if request["uid"] is not None:
        os.setgroups([])
        os.setgid(request["uid"])
        os.setuid(request["uid"])
    if request["filter"] is not None and os.geteuid() == 0:
        sys.exit("the sandbox would run code as root: user namespaces are not available")
    for name, limit in request["rlimits"].items():
        with contextlib.suppress(ValueError, OSError):  # a lower limit is in force, or the system does not have it
            resource.setrlimit(getattr(resource, name), (limit, limit))
    if request["filter"] is not None:
        install_filter(bytes.fromhex(request["filter"]))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code, mark = request["code"], request["mark"]
    del request
    os.write(1, mark.encode())
    status = execute(code)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    os.write(1, f"{mark}{status}".encode())
    os._exit(0)  # without waiting for threads


def install_filter(program: bytes) -> None:
    class Program(ctypes.Structure):
        _fields_ = (("instructions", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    libc = ctypes.CDLL(None, use_errno=True)
    filters = Program(len(program) // 8, program)
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(set_seccomp, mode_filter, ctypes.byref(filters)):
        sys.exit(f"the system call filter was refused: {os.strerror(ctypes.get_errno())}")


def execute(code: str) -> str:
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(code, "<code>", "exec"), module.__dict__)
    except MemoryError:
        return "memory"
    except BaseException:  # also sys.exit(): tests after it have not run
        with contextlib.suppress(BaseException):
            traceback.print_exc()
            sys.stderr.flush()
        return "failed"
    return "ok"


main()
