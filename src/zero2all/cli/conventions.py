"""What every command keeps to.

Logs and progress go to stderr. A command's result goes to stdout: text, or with ``--json`` exactly one JSON object,
also when it fails. Exit status: 0 done, 1 failed or stopped, 2 wrong usage or recipe.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec

import typer

from zero2all.console import say
from zero2all.errors import DiskFullError, RecipeError, Z2aError, is_disk_full
from zero2all.masking import mask

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of text.")]
RecipePath = Annotated[Path, typer.Argument(help="A recipe in YAML.", metavar="RECIPE")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Changes to the recipe, such as train.steps=200", metavar="[KEY=VALUE]..."),
]
Target = Annotated[str, typer.Argument(help="A preset by name, or a recipe in YAML.", metavar="PRESET|RECIPE")]
RunPath = Annotated[Path, typer.Argument(help="A run directory, or the directory above it.", metavar="RUN")]

EngineKind = Annotated[
    Literal["local", "ray"], typer.Option("--engine", help="Processes of this machine, or tasks of a Ray cluster.")
]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Local processes; all cores if not given.")]
RayAddress = Annotated[
    str | None, typer.Option("--ray-address", help="A running cluster; a new one here if not given.")
]

Parameters = ParamSpec("Parameters")
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by the agent of 'z2a launch' and by torchrun
printed = False  # whether the one JSON object is out already


@dataclass(frozen=True)
class Result:
    """What a command has to say: for a program, and for a person."""

    data: dict[str, Any]
    text: str

    def show(self, as_json: bool) -> None:
        if as_json:
            print_json(self.data)
        elif self.text:
            sys.stdout.write(self.text.rstrip("\n") + "\n")


def command(function: Callable[Parameters, Result]) -> Callable[Parameters, None]:
    """Run a command under the conventions above."""

    @functools.wraps(function)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        global printed
        printed = False  # a process may run several commands
        as_json = bool(kwargs.get("json"))
        try:
            result = function(*args, **kwargs)
        except typer.Exit:
            raise  # the command has said why
        except Z2aError as error:
            _fail(str(error), error.exit_code, as_json, error)
        except OSError as error:
            full = DiskFullError.of(error.filename or "what was being written")
            _fail(str(full if is_disk_full(error) else error), 1, as_json, error)
        except KeyboardInterrupt:
            _fail(
                "stopped; what was finished is kept, and nothing half-written: run the same command again", 1, as_json
            )
        except Exception as error:
            if ERROR_FILE not in os.environ:  # under an agent, which shows the one that matters
                say(traceback.format_exc().rstrip())
            _fail(f"this is a bug in zero2all: {type(error).__name__}: {error}", 1, as_json, error)
        else:
            result.show(as_json)

    return wrapped


def print_json(value: dict[str, Any]) -> None:
    """The one object; a second call says nothing."""
    global printed
    if not printed:
        sys.stdout.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
        printed = True


def _fail(message: str, status: int, as_json: bool, error: Exception | None = None) -> None:
    say(f"error: {message}")
    if error is not None and ERROR_FILE in os.environ:
        from zero2all.resilience.rank import leave_word

        leave_word(error)
    if as_json:
        problems = error.problems if isinstance(error, RecipeError) else []
        print_json({"error": mask(message), "problems": [vars(problem) for problem in problems]})
    raise typer.Exit(status)
