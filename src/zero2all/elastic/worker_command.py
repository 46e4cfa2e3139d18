"""What ``z2a launch -- COMMAND`` starts as a rank: a z2a command, a Python script, or another program."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
