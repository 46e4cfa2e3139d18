"""Errors a person can act on. Anything else that escapes is a bug and keeps its traceback."""

from __future__ import annotations

import errno
import importlib
import re
from dataclasses import dataclass, replace
from types import ModuleType

from zero2all.masking import mask


class Z2aError(Exception):
    """Something failed that the message tells how to mend. Secrets of URLs in it are masked, wherever it goes."""

    exit_code = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(mask(arg) if isinstance(arg, str) else arg for arg in args))


class UsageError(Z2aError):
    """The command or the recipe asks for something that cannot be."""

    exit_code = 2


class DiskFullError(Z2aError):
    """Nothing more fits on a disk, or in a user's share of it."""

    @classmethod
    def of(cls, place: object) -> DiskFullError:
        return cls(
            f"no space left for {place}: free some on that disk or choose another place, and run the same command again"
        )


# As Rust libraries and numpy say it, which give no number.
_FULL = re.compile(r"No space left on device|Disk quota exceeded|\d+ requested and \d+ written")


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed for want of space, whichever library it was."""
    if isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno is not None):
        return isinstance(error, DiskFullError) or error.errno in (errno.ENOSPC, errno.EDQUOT)
    return not isinstance(error, Z2aError) and _FULL.search(str(error)) is not None


class Interrupted(Z2aError):
    """The user stopped the work; the message says how to go on."""


@dataclass(frozen=True)
class Problem:
    """One mistake in a recipe: where it is, what is wrong, and a mend if there is an obvious one."""

    path: str
    message: str
    hint: str = ""
    line: int | None = None

    def __str__(self) -> str:
        where = f"line {self.line}, {self.path}" if self.line else self.path
        return f"{where}: {self.message}" + (f" ({self.hint})" if self.hint else "")


class RecipeError(UsageError):
    """Every mistake found in a recipe, not only the first."""

    def __init__(self, origin: str, problems: list[Problem]) -> None:
        self.origin = mask(origin)
        self.problems = [replace(one, message=mask(one.message), hint=mask(one.hint)) for one in problems]
        count = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        super().__init__("\n".join([f"{origin}: {count}", *(f"  - {problem}" for problem in self.problems)]))


def need(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or say in one line what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name and error.name.split(".")[0] != module.split(".")[0]:
            raise  # installed, but broken inside: hiding that would send people in circles
        raise Z2aError(f"this needs {module}: pip install 'zero2all[{extra}]'") from error
