"""What a rank of ``z2a launch -- python script.py`` runs: any program, which need not know zero2all.

A Python script runs in this process, as ``python script.py`` would run it, beside what the agent asks: stacks on
SIGUSR1, and torch's flight recorder. Any other program replaces this process. Both end with their agent.

    python -m zero2all.elastic.script run script.py ARGS...
    python -m zero2all.elastic.script module package.module ARGS...
    python -m zero2all.elastic.script exec PROGRAM ARGS...
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from types import TracebackType
from typing import NoReturn

from zero2all.console import say
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
            if not sys.flags.safe_path:
                sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
            runpy.run_path(words[0], run_name="__main__")
    except Exception as error:
        error.__traceback__ = _without_own_frames(error.__traceback__)
        if "torch" in sys.modules:  # else its log lines have to do: importing torch takes seconds
            record_exception(error)
        raise


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
