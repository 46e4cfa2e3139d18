"""What ``z2a launch -- COMMAND`` starts as a rank: a z2a command, a Python script, or another program; and its side of
the agent: end with it, dump stacks on request, and record errors.

A script need not know zero2all. A Python script runs in this process, as ``python script.py`` would run it, beside what
the agent asks: stacks on SIGUSR1, and torch's flight recorder. Any other program replaces this process.

    python -m zero2all.cluster.launch.worker run script.py ARGS...
    python -m zero2all.cluster.launch.worker module package.module ARGS...
    python -m zero2all.cluster.launch.worker exec PROGRAM ARGS...
"""

from __future__ import annotations

import atexit
import faulthandler
import io
import os
import re
import runpy
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from pkgutil import get_importer
from types import ModuleType, TracebackType
from typing import IO, TYPE_CHECKING, NoReturn

from zero2all.base.environment import AGENT_DIR_VARIABLE, has_agent
from zero2all.base.errors import Z2aError
from zero2all.base.processes import end_with_agent
from zero2all.cluster.launch.exit_reason import USAGE_ERROR_STATUS
from zero2all.cluster.launch.heartbeat import DEVICE_WATCH, Heartbeat, StartupPhase

if TYPE_CHECKING:  # imported when it is needed: pydantic takes time
    from zero2all.cluster.launch.flight_recorder import DeviceState

ABORT_REQUEST = b"abort"
ABORT_TIMEOUT = 2.0  # seconds for NCCL to end its collectives
_kept_open: list[IO[str]] = []  # files that faulthandler writes to later


class PeerLostError(Z2aError):
    """Another rank is gone, and this one cannot go on."""


def setup_worker() -> None:
    """Call first in a process that an agent may have started; without an agent it does nothing."""
    if not has_agent():
        return
    end_with_agent()
    torch_imported = threading.Event()
    _answer_agent(torch_imported.is_set)
    import zero2all.base.torch_private  # noqa: F401 - every rank needs torch, and its seconds count as imports

    torch_imported.set()
    Heartbeat.from_environment().record_phase(StartupPhase.IMPORTED)


def setup_script() -> None:
    """The same in a process whose program may never import torch."""
    if has_agent():
        _answer_agent(_has_process_group)
        Heartbeat.from_environment().record_phase(StartupPhase.IMPORTED)


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return getattr(distributed, "is_initialized", bool)()  # it may still be importing


def _answer_agent(can_dump: Callable[[], bool]) -> None:
    directory, local_rank = Path(os.environ[AGENT_DIR_VARIABLE]), int(os.environ["LOCAL_RANK"])
    faulthandler.enable()
    stacks = open(stacks_path(directory, local_rank), "w", encoding="utf-8")  # noqa: SIM115
    _kept_open.append(stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    dump_request = dump_request_path(directory, local_rank)
    dump_request.unlink(missing_ok=True)
    os.mkfifo(dump_request)
    answer = (dump_request, collectives_path(directory, local_rank), can_dump)
    thread = threading.Thread(target=_serve_requests, args=answer, name="z2a-bell", daemon=True)
    thread.start()
    dump_thread_path(directory, local_rank).write_text(str(thread.native_id), encoding="ascii")


def run_worker(program: Callable[[], int | None]) -> NoReturn:
    """Run the program of a rank and end the process with its exit status, without the interpreter's own shutdown.

    Remaining native threads of torch have been seen to abort a process whose work was done and saved: its
    agent would take a rank that stopped gracefully for one that crashed. Exit handlers of Python still run.
    """
    status = 1
    try:
        status = program() or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    if not has_agent():
        sys.exit(status)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def record_exception(error: BaseException) -> None:
    """Write torch's error file, which the agent reads. Call it where the error is handled."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def stacks_path(directory: Path, local_rank: int) -> Path:
    return directory / f"stacks-{local_rank}"


def dump_request_path(directory: Path, local_rank: int) -> Path:
    return directory / f"bell-{local_rank}"


def dump_thread_path(directory: Path, local_rank: int) -> Path:
    """The file with the id of the thread that answers these requests."""
    return directory / f"bell-{local_rank}.thread"


def collectives_path(directory: Path, local_rank: int) -> Path:
    return directory / f"collectives-{local_rank}.json"


def _serve_requests(requests: Path, to: Path, can_dump: Callable[[], bool]) -> None:
    """Each time the agent opens the FIFO, do what it writes, or dump torch's flight recorder. The main thread may be
    stuck meanwhile."""
    while True:
        try:
            request = requests.read_bytes()
            if request == ABORT_REQUEST and can_dump():
                exit_if_cut_off()
            partial = to.with_suffix(".new")
            partial.write_bytes(_try_dump() if can_dump() else b"{}")
            partial.replace(to)
        except OSError:
            return  # the agent's directory is gone, and the agent with it


def exit_if_cut_off() -> None:
    """A peer is lost. Gloo raises an error in every rank that waits for it; a rank that waits for NCCL sleeps on, and
    cannot even handle SIGTERM. So end NCCL's collectives and the process: what they would have computed is lost."""
    from zero2all.base.torch_private import abort_nccl_groups, has_nccl_groups

    if not has_nccl_groups():
        return
    record_exception(PeerLostError("connection closed: a peer was lost while this rank waited for NCCL"))
    # NCCL may hang while it aborts; the process ends all the same.
    aborting = threading.Thread(target=abort_nccl_groups, name="z2a-abort", daemon=True)
    aborting.start()
    aborting.join(ABORT_TIMEOUT)
    os._exit(1)


def _try_dump() -> bytes:
    try:
        return _flight_recorder()
    except Exception:  # CUDA has failed, or this torch writes another format: the next request is served all the same
        traceback.print_exc()
        return b"{}"


def _flight_recorder() -> bytes:
    from zero2all.base.machine.devices import use_rank_device
    from zero2all.base.torch_private import dump_flight_recorders, process_group_ranks
    from zero2all.cluster.launch.flight_recorder import merge_dumps

    with suppress(RuntimeError):  # a script may use another device than its rank has
        use_rank_device()  # NCCL's recorder asks its events how far the device is
    main_thread = threading.main_thread().ident or 0
    return merge_dumps(dump_flight_recorders(), process_group_ranks(), main_thread, _device_state())


def _device_state() -> DeviceState:
    from zero2all.cluster.launch.flight_recorder import DeviceState

    try:
        position = DEVICE_WATCH.position()
    except RuntimeError:  # a kernel has failed, which every call of CUDA reports from then on
        position = None
    return DeviceState(position, DEVICE_WATCH.is_host_waiting())


CLI_MODULE = "zero2all.cli"
SCRIPT_MODULE = "zero2all.cluster.launch.worker"
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_FLAGS = re.compile(r"-[bBdOqsSuvx]+")  # options of the interpreter that have no value
_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


@dataclass(frozen=True)
class WorkerCommand:
    """
    >>> worker_command(["python", "-u", "train.py", "--lr", "3e-4"], "zero2all.cli").args
    ('-u', '-m', 'zero2all.cluster.launch.worker', 'run', 'train.py', '--lr', '3e-4')
    """

    args: tuple[str, ...]
    """The arguments of this interpreter."""
    is_script: bool
    """Whether it is no z2a command: then it opens no run directory, and may send no heartbeat."""


def is_script(command: Sequence[str]) -> bool:
    """A Python interpreter or a path is not the name of a z2a command."""
    return bool(command) and (_PYTHON.fullmatch(Path(command[0]).name) is not None or os.sep in command[0])


def worker_command(command: Sequence[str], module: str) -> WorkerCommand:
    """``module`` runs z2a commands; another than the usual one takes any words."""
    if module != CLI_MODULE or not is_script(command):
        return WorkerCommand(("-m", module, *command), is_script=False)
    options, program = _split_interpreter_options(command[1:])
    if _is_own_interpreter(command[0]) and program:
        if program[0] == "-m" and len(program) > 1:
            return WorkerCommand((*options, "-m", SCRIPT_MODULE, "module", *program[1:]), is_script=True)
        if not program[0].startswith("-"):
            return WorkerCommand((*options, "-m", SCRIPT_MODULE, "run", *program), is_script=True)
    return WorkerCommand(("-m", SCRIPT_MODULE, "exec", *command), is_script=True)


def _split_interpreter_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options of the interpreter that are understood, and the rest: a script, ``-m``, or an option that is not."""
    index = 0
    while index < len(words):
        if words[index] in _OPTIONS_WITH_VALUE:
            index += 2
        elif _FLAGS.fullmatch(words[index]):
            index += 1
        else:
            break
    return list(words[:index]), list(words[index:])


def _is_own_interpreter(program: str) -> bool:
    """Whether it is this interpreter, in which alone zero2all is sure to be installed. Links of a venv all lead to the
    same file, so the directory counts."""
    found = shutil.which(program)
    return found is not None and Path(found).parent.resolve() == Path(sys.executable).parent.resolve()


NOT_EXECUTABLE_STATUS, NOT_FOUND_STATUS = 126, 127  # as a shell reports them


def main(mode: str, *words: str) -> None:
    end_with_agent()
    if mode == "exec":
        _replace_process(words)
    setup_script()
    sys.excepthook = _show_exception
    sys.argv = list(words)
    try:
        if mode == "module":
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            _run_file(words[0])
    except Exception as error:
        error.__traceback__ = _without_own_frames(error.__traceback__)
        if "torch" in sys.modules:  # else its log lines have to do: importing torch takes seconds
            record_exception(error)
        raise


def _run_file(script: str) -> None:
    """``runpy.run_path`` would leave ``__file__`` or ``sys.argv`` other than Python sets them."""
    if get_importer(script) is not None:  # a directory or an archive
        runpy.run_path(script, run_name="__main__")
        return
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    path = os.path.abspath(script)
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    sys.modules["__main__"] = module
    try:
        with io.open_code(path) as stream:
            source = stream.read()
    except OSError as error:
        _say(f"{path}: {error.strerror}")
        sys.exit(USAGE_ERROR_STATUS)  # as Python does; it is not tried again
    code = compile(source, path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _replace_process(words: tuple[str, ...]) -> NoReturn:
    try:
        os.execvp(words[0], words)
    except OSError as error:
        _say(f"{words[0]}: {error.strerror}")
        sys.exit(NOT_FOUND_STATUS if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE_STATUS)


def _say(text: str) -> None:
    from zero2all.base.console import say  # takes longer than the other imports of a rank's first module

    say(text)


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The trace without the frames of this file and of runpy, which the user has not called."""
    own = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return trace


def _show_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    traceback.print_exception(kind, error, _without_own_frames(trace))


if __name__ == "__main__":
    main(*sys.argv[1:])
