"""What a rank of ``z2a launch -- python script.py`` runs: any program, which need not know zero2all.

A Python script runs in this process, as ``python script.py`` would run it, beside what the agent asks: stacks on
SIGUSR1, and torch's flight recorder. Any other program replaces this process. Both end with their agent.

    python -m zero2all.elastic.script run script.py ARGS...
    python -m zero2all.elastic.script module package.module ARGS...
    python -m zero2all.elastic.script exec PROGRAM ARGS...
"""

from __future__ import annotations

import io
import os
import runpy
import sys
import traceback
from importlib.machinery import SourceFileLoader
from pkgutil import get_importer
from types import ModuleType, TracebackType
from typing import NoReturn

from zero2all.console import say
from zero2all.elastic.exit_reason import USAGE_ERROR_STATUS
from zero2all.processes import end_with_agent

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
