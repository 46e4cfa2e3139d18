"""The program inside the sandbox: it limits itself and executes the code. Passed to Python as text, with ``-c``.

One process executes the code, and its parent reports how that ended. Messages are JSON behind their length. stdin has
two: limits for both processes, then the code for the parent. A script prints to stdout between two marks that only the
parent knows. Without the first the sandbox has failed, without the last the code ended its process itself. An answer
and its tests run in two sandboxes, and call each other through stdin and stdout.
"""

import builtins
import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import traceback
import types
from typing import Any, NoReturn

Message = dict[str, Any]
STATUSES = (b"ok", b"failed", b"memory", b"unsupported")


def main() -> None:
    limits = receive(0)
    limit_process(limits)
    work_end, work = os.pipe()
    report, report_end = os.pipe()
    code_process = os.fork()
    if code_process == 0:
        os.close(work)
        os.close(report)
        if limits["filters"] is not None:
            os.setsid()  # a signal to its process group stays inside; the backend ends all processes
        run_code(receive(work_end), report_end)
    os.close(work_end)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    start = receive(0)  # after the fork: the memory of the code's process never has the mark
    mark = start["mark"].encode("latin-1")
    os.write(1, mark)
    send(work, start["work"])
    _, ended = os.waitpid(code_process, 0)
    os.set_blocking(report, False)
    status = b"killed"
    with contextlib.suppress(BlockingIOError):
        reported = os.read(report, 64)
        status = reported if reported in STATUSES else status
    exit_code = os.waitstatus_to_exitcode(ended)
    if status != b"killed" and exit_code == 0:
        os.write(1, mark + status)
    os._exit(exit_code if exit_code >= 0 else 128 - exit_code)


def limit_process(limits: Message) -> None:
    if limits["uid"] is not None:
        os.setgroups([])
        os.setgid(limits["uid"])
        os.setuid(limits["uid"])
    if limits["filters"] is not None and os.geteuid() == 0:
        sys.exit("the sandbox would run code as root: user namespaces are not available")
    for name, limit in limits["rlimits"].items():
        with contextlib.suppress(ValueError, OSError):  # a lower limit is in force, or the system does not have it
            resource.setrlimit(getattr(resource, name), (limit, limit))
    if limits["filters"] is not None:
        install_filter(bytes.fromhex(limits["filters"][sys.argv[1]]))


def install_filter(program: bytes) -> None:
    class Program(ctypes.Structure):
        _fields_ = (("instructions", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    libc = ctypes.CDLL(None, use_errno=True)
    filters = Program(len(program) // 8, program)
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(set_seccomp, mode_filter, ctypes.byref(filters)):
        sys.exit(f"the kernel rejects the system call filter: {os.strerror(ctypes.get_errno())}")


def send(stream: int, message: object) -> None:
    content = json.dumps(message).encode()
    content = struct.pack(">I", len(content)) + content
    while content:
        content = content[os.write(stream, content) :]


def receive(stream: int) -> Message:
    """The next message, an object. Reads no byte of what follows."""
    message = json.loads(read(stream, struct.unpack(">I", read(stream, 4))[0]))
    if not isinstance(message, dict):
        raise ValueError("a message is an object")
    return message


def read(stream: int, size: int) -> bytes:
    content = b""
    while len(content) < size:
        chunk = os.read(stream, size - len(content))
        if not chunk:
            raise EOFError
        content += chunk
    return content


def run_code(work: Message, report: int) -> None:
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    if work["role"] == "script":
        status = execute(work["code"], module)
    else:
        os.dup2(2, 1)
        sys.set_int_max_str_digits(0)
        role = serve_answer if work["role"] == "answer" else run_tests
        status = role(work, module, requests, replies)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    os.write(report, status.encode())
    os._exit(0)  # without waiting for threads


def execute(code: str, module: types.ModuleType) -> str:
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


def serve_answer(work: Message, module: types.ModuleType, requests: int, replies: int) -> str:
    """Execute the answer, and call its function as the tests ask."""
    status = execute(work["code"], module)
    function = module.__dict__.get(work["function"])
    with contextlib.suppress(EOFError):
        while True:
            call = receive(requests)
            send(replies, reply(function, call) if status == "ok" else {"failed": "the answer does not run"})
    return status


def reply(function: Any, call: Message) -> Message:
    arguments = decode(call["arguments"])
    try:
        result = function(*arguments, **decode(call["named"]))
    except Exception as error:
        if isinstance(error, MemoryError):
            return {"failed": "MemoryError"}
        names = [kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind]
        text = ""
        with contextlib.suppress(BaseException):
            text = str(error)
        return {"raised": names[0], "text": text}
    except BaseException as error:
        return {"failed": type(error).__name__}
    try:
        after = encode(arguments)
        return {"result": encode(result), "changed": None if after == call["arguments"] else after}
    except (TypeError, RecursionError) as error:
        return {"unsupported": str(error)}


class TestsEndError(BaseException):
    """The tests cannot go on. Not an Exception, which tests may catch."""


def run_tests(work: Message, module: types.ModuleType, requests: int, replies: int) -> str:
    """Execute tests. The function under test runs in the process of the answer."""
    verdicts: list[str] = []

    def end(verdict: str, reason: str) -> NoReturn:
        verdicts.append(verdict)
        raise TestsEndError(reason)

    def candidate(*arguments: Any, **named: Any) -> Any:
        if verdicts:
            raise TestsEndError(verdicts[0])
        try:
            call = {"arguments": encode(list(arguments)), "named": encode(named)}
        except (TypeError, RecursionError) as error:
            end("unsupported", f"an argument of the tests is not plain data: {error}")
        try:
            send(replies, call)
            answer = receive(requests)
            if "unsupported" in answer:
                end("unsupported", f"the result is not plain data: {answer['unsupported']}")
            if "failed" in answer:
                end("failed", f"the answer ended: {answer['failed']}")
            if "raised" not in answer:
                result = decode(answer["result"])
                write_back(arguments, decode(answer["changed"]) or [])
                return result
            raised = exception(str(answer["raised"]), str(answer["text"]))
        except (EOFError, OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            end("failed", f"the answer sent no result: {error!r}")
        raise raised

    execute(work["context"], module)  # what it defines the tests may use
    module.__dict__[work["function"]] = candidate
    status = execute(work["code"], module)
    return verdicts[0] if verdicts else status


def exception(name: str, text: str) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # some take more than a text
            return kind(text)
    return RuntimeError(f"{name}: {text}")


def write_back(arguments: tuple[Any, ...], changed: list[Any]) -> None:
    """What the function did to its arguments."""
    for argument, after in zip(arguments, changed, strict=False):
        if type(argument) in (list, bytearray):
            argument[:] = after
        elif type(argument) in (dict, set):
            argument.clear()
            argument.update(after)


def encode(value: Any) -> Any:
    """Plain data for JSON: scalars as they are, the rest as ``[type, content]``."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    kind: Any
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [encode(one) for one in kind.__iter__(value)]]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(one)] for key, one in dict.items(value)]]
    for kind in (bytes, bytearray):
        if isinstance(value, kind):
            return [kind.__name__, kind.hex(value)]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    raise TypeError(f"{type(value).__name__} is not plain data")


def decode(value: Any) -> Any:
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise ValueError("not a value")
        return value
    name, content = value
    if name in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, name)(decode(one) for one in content)
    if name == "dict":
        return {decode(key): decode(one) for key, one in content}
    if name in ("bytes", "bytearray"):
        return getattr(builtins, name).fromhex(content)
    if name == "complex":
        return complex(*content)
    raise ValueError(f"unknown type {name!r}")


main()
