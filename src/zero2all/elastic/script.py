"""What ``z2a launch -- COMMAND`` starts as a rank: a z2a command, a Python script, or another program.

A script need not know zero2all. A Python script runs in this process, as ``python script.py`` would run it, beside what
the agent asks: stacks on SIGUSR1, and torch's flight recorder. Any other program replaces this process. Both end with
their agent.

    python -m zero2all.elastic.script run script.py ARGS...
    python -m zero2all.elastic.script module package.module ARGS...
    python -m zero2all.elastic.script exec PROGRAM ARGS...
"""

from __future__ import annotations

import io
import os
import re
import runpy
import shutil
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from pkgutil import get_importer
from types import ModuleType, TracebackType
from typing import NoReturn

from zero2all.console import say
from zero2all.elastic.exit_reason import USAGE_ERROR_STATUS
from zero2all.processes import end_with_agent

CLI_MODULE = "zero2all.cli"
SCRIPT_MODULE = "zero2all.elastic.script"
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_FLAGS = re.compile(r"-[bBdOqsSuvx]+")  # options of the interpreter that have no value
_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


@dataclass(frozen=True)
class WorkerCommand:
    """
    >>> worker_command(["python", "-u", "train.py", "--lr", "3e-4"], "zero2all.cli").args
    ('-u', '-m', 'zero2all.elastic.script', 'run', 'train.py', '--lr', '3e-4')
    """

    args: tuple[str, ...]
    """Of this interpreter."""
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
    """Only in this interpreter is zero2all sure to be installed. Links of a venv all lead to the same file, so the
    directory counts."""
    found = shutil.which(program)
    return found is not None and Path(found).parent.resolve() == Path(sys.executable).parent.resolve()


NOT_EXECUTABLE_STATUS, NOT_FOUND_STATUS = 126, 127  # as a shell reports them


def main(mode: str, *words: str) -> None:
    end_with_agent()
    if mode == "exec":
        _replace_process(words)
    from zero2all.elastic.worker import record_exception, setup_script

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
        say(f"{path}: {error.strerror}")
        sys.exit(USAGE_ERROR_STATUS)  # as Python does; it is not tried again
    code = compile(source, path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _replace_process(words: tuple[str, ...]) -> NoReturn:
    try:
        os.execvp(words[0], words)
    except OSError as error:
        say(f"{words[0]}: {error.strerror}")
        sys.exit(NOT_FOUND_STATUS if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE_STATUS)


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Without those of this file and of runpy, which the user has not called."""
    own = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return trace


def _show_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    traceback.print_exception(kind, error, _without_own_frames(trace))


if __name__ == "__main__":
    main(*sys.argv[1:])
