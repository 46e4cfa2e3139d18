"""Errors that a user can act on. Anything else that escapes is a bug and keeps its traceback."""

from __future__ import annotations

import errno
import importlib
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType

from zero2all.base.redact import redact


class Z2aError(Exception):
    """A failure whose message says how to fix it. Secrets in URLs are redacted, wherever the message goes."""

    exit_code = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact(arg) if isinstance(arg, str) else arg for arg in args))


class UsageError(Z2aError):
    """The command or the recipe requests something impossible."""

    exit_code = 2


class DiskFullError(Z2aError):
    """The disk or the user's quota is full. See ``zero2all.base.io.disk_full_error``."""

    reason: str = ""
    """The message without the advice."""
    needed: int | None = None
    """Bytes that are needed at least, if known."""


# torch raises a plain RuntimeError with these messages: in main memory, and on the GPU of a Mac.
_OUT_OF_MEMORY_MESSAGE = re.compile(r"DefaultCPUAllocator: can't allocate memory|MPS backend out of memory")
# Messages of Rust libraries and numpy, which set no errno.
_DISK_FULL_MESSAGE = re.compile(r"No space left on device|Disk quota exceeded|\d{1,20} requested and \d{1,20} written")


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed because the disk is full, in whichever library."""
    if isinstance(error, Z2aError):
        return isinstance(error, DiskFullError)
    if isinstance(error, OSError) and error.errno is not None:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    else:
        is_full = _DISK_FULL_MESSAGE.search(str(error)) is not None
    cause = error.__cause__ or error.__context__  # torch raises an error of its own while it handles the real one
    return is_full or (cause is not None and is_disk_full(cause))


def is_quota_exceeded(error: BaseException) -> bool:
    """Whether a full disk is full only for this user."""
    is_exceeded = getattr(error, "errno", None) == errno.EDQUOT or "Disk quota exceeded" in str(error)
    cause = error.__cause__ or error.__context__
    return is_exceeded or (cause is not None and is_quota_exceeded(cause))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: in Python, or in torch on a GPU or in main memory. torch need not be imported."""
    is_named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_named or _OUT_OF_MEMORY_MESSAGE.search(str(error)) is not None


class Interrupted(Z2aError):
    """The user interrupted the work; the message says how to resume."""


@dataclass(frozen=True)
class RecipeProblem:
    """One mistake in a recipe: where it is, what is wrong, and a fix if there is an obvious one."""

    path: str
    message: str
    hint: str = ""
    line: int | None = None
    """The line of the file."""
    override: str = ""
    """The override on the command line, if the mistake is there."""

    def __str__(self) -> str:
        where = f"line {self.line}" if self.line else f"command line, {self.override}" if self.override else ""
        is_said = self.message.startswith(f"`{self.path}") or self.override.startswith(self.path)
        # A rule over several sections has no path of its own; the place says enough.
        path = "" if is_said or (where and self.path == "recipe") else self.path
        place = ", ".join(filter(None, (where, path)))
        return (f"{place}: " if place else "") + self.message + (f" ({self.hint})" if self.hint else "")


class RecipeError(UsageError):
    """All mistakes found in a recipe, not only the first."""

    def __init__(self, origin: str, problems: list[RecipeProblem]) -> None:
        self.origin = redact(origin)
        self.problems = [
            replace(one, message=redact(one.message), hint=redact(one.hint), override=redact(one.override))
            for one in problems
        ]
        count = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        super().__init__("\n".join([f"{origin}: {count}", *(f"  - {problem}" for problem in self.problems)]))


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Drop the warnings and log lines of libraries: a user cannot act on a kernel that torchao was not built with.

    Errors still show. Use it around imports, and around calls that import lazily.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def need(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or raise an error that names what to install."""
    try:
        with quiet_libraries():
            return importlib.import_module(module)
    except ImportError as error:
        if error.name and error.name.split(".")[0] != module.split(".")[0]:
            raise  # installed, but broken inside: hiding that would send people in circles
        raise Z2aError(f"this needs {module}: pip install 'zero2all[{extra}]'") from error
