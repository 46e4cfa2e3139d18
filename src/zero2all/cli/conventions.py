"""Conventions of every command.

Logs and progress go to stderr. A command's result goes to stdout: text, or with ``--json`` exactly one JSON object,
also when it fails. Exit status: 0 done, 1 failed or interrupted, 2 wrong usage or recipe.
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
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer
from typer.core import TyperOption

from zero2all.base.console import say, set_verbose
from zero2all.base.errors import RecipeError, UsageError, Z2aError, is_disk_full, is_out_of_memory
from zero2all.base.redact import redact
from zero2all.base.units import parse_bytes
from zero2all.cli.error_pages import help_anchor

if TYPE_CHECKING:
    from zero2all.base.tasks import TaskEngine

OUT_OF_MEMORY_ADVICE = (
    "in training try a smaller train.micro_batch_tokens, parallel.activation_checkpointing=selective, or more ranks; "
    "'z2a plan RECIPE --gpu here' estimates what is needed"
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of text.")]


def _show_all(ctx: typer.Context, asked: bool) -> None:
    if asked:
        for parameter in ctx.command.params:
            if isinstance(parameter, TyperOption):
                parameter.hidden = False
        typer.echo(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show the rare options too, and exit.")
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", help="Also print TFLOP/s, HFU, memory and the loss of each source with every log line."),
]
RecipePath = Annotated[
    Path, typer.Argument(help="The recipe: a YAML file, or the directory of a run.", metavar="RECIPE")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Recipe overrides, such as train.steps=200.", metavar="[KEY=VALUE]...")
]
RecipeOrPreset = Annotated[
    str, typer.Argument(help="Name of a preset, a recipe file, or the directory of a run.", metavar="PRESET|RECIPE")
]
RunPath = Annotated[
    Path, typer.Argument(help="The run directory, or the output directory that contains it.", metavar="RUN")
]
Target = Annotated[
    str,
    typer.Argument(help="A run, a checkpoint of a run or a Hugging Face directory.", metavar="RUN|CHECKPOINT|HF_DIR"),
]
CheckpointStep = Annotated[
    int | None, typer.Option("--step", help="Use the checkpoint of this step. Default: the newest.")
]
TensorParallel = Annotated[
    int, typer.Option("--tp", min=1, help="Tensor parallelism: number of ranks, started with 'z2a launch'.")
]
PipelineParallel = Annotated[
    int, typer.Option("--pp", min=1, help="Pipeline parallelism: number of ranks, started with 'z2a launch'.")
]

Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Number of local processes. Default: one per core.")
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Run tasks on the Ray cluster at this address, for a corpus too large for one machine; auto starts one "
        "here. Default: local processes.",
    ),
]
VerifyOutput = Annotated[
    bool, typer.Option("--verify", help="Compare every byte of finished output with its checksum, not only samples.")
]


def task_engine(workers: int, ray: str | None) -> TaskEngine:
    from zero2all.base.tasks import TaskEngine

    if ray is None:
        return TaskEngine("local", workers)
    return TaskEngine("ray", workers, None if ray == "auto" else ray)


Parameters = ParamSpec("Parameters")
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by the agent of 'z2a launch' and by torchrun
json_printed = False  # whether the one JSON object has been printed


@dataclass(frozen=True)
class Result:
    """The result of a command, as JSON and as text."""

    data: object
    """A record, or a dict of JSON values and records."""
    text: str

    def show(self, *, as_json: bool) -> None:
        if as_json:
            print_json(self.data)
        elif self.text:
            sys.stdout.write(self.text.rstrip("\n") + "\n")


def command(function: Callable[Parameters, Result]) -> Callable[Parameters, None]:
    """Run a command under the conventions above."""
    return _with_conventions(function, "interrupted")


def resumable_command(function: Callable[Parameters, Result]) -> Callable[Parameters, None]:
    """Like :func:`command`, for a command that continues where it stopped if it is run again."""
    return _with_conventions(function, "interrupted; finished work is kept: run the same command again to continue")


def _with_conventions(function: Callable[Parameters, Result], interrupted: str) -> Callable[Parameters, None]:
    @functools.wraps(function)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        global json_printed
        json_printed = False  # a process may run several commands
        set_verbose(on=bool(kwargs.get("verbose")))
        as_json = bool(kwargs.get("json"))
        try:
            result = function(*args, **kwargs)
        except typer.Exit:
            raise  # the command has reported why
        except Z2aError as error:
            _exit_with_error(str(error), error.exit_code, as_json=as_json, error=error)
        except KeyboardInterrupt:
            _exit_with_error(interrupted, 1, as_json=as_json)
        except Exception as error:
            if is_disk_full(error):
                _exit_with_error(_disk_full_message(error), 1, as_json=as_json, error=error)
            if isinstance(error, OSError):
                _exit_with_error(str(error), 1, as_json=as_json, error=error)
            if is_out_of_memory(error):
                first_line = (str(error).splitlines() or [type(error).__name__])[0]
                _exit_with_error(
                    f"out of memory: {first_line}; {OUT_OF_MEMORY_ADVICE}", 1, as_json=as_json, error=error
                )
            if ERROR_FILE not in os.environ:
                say(traceback.format_exc().rstrip())
            elif _has_lost_peer(error):  # the agent shows the rank that matters
                lost = "lost the connection to another rank, which ended first: its error is the cause"
                _exit_with_error(lost, 1, as_json=as_json, error=error)
            _exit_with_error(
                f"this is a bug in zero2all: {type(error).__name__}: {error}", 1, as_json=as_json, error=error
            )
        else:
            result.show(as_json=as_json)

    return wrapped


def _has_lost_peer(error: Exception) -> bool:
    from zero2all.cluster.launch.exit_reason import CONNECTION_LOST

    return CONNECTION_LOST.search(str(error)) is not None


def parse_size(option: str, size: str | None) -> int | None:
    """Bytes of the value of an option, such as ``200MB``."""
    try:
        return None if size is None else parse_bytes(size)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def _disk_full_message(error: Exception) -> str:
    from zero2all.base.io import disk_full_error

    name = getattr(error, "filename", None)
    return str(disk_full_error(Path(name) if isinstance(name, str) else None, error))


def print_json(value: object) -> None:
    """Print the one object, a record or a dict; a second call prints nothing."""
    global json_printed
    if not json_printed:
        from zero2all.base.records import to_json

        sys.stdout.write(json.dumps(value, ensure_ascii=False, allow_nan=False, default=to_json) + "\n")
        json_printed = True


def _exit_with_error(message: str, status: int, *, as_json: bool, error: Exception | None = None) -> None:
    say(f"error: {message}")
    if (anchor := help_anchor(message)) is not None:
        say(f"see {anchor}")
    if error is not None and ERROR_FILE in os.environ:
        from zero2all.cluster.launch.worker import record_exception

        record_exception(error)
    if as_json:
        problems = error.problems if isinstance(error, RecipeError) else []
        print_json({"error": redact(message), "problems": problems})
    raise typer.Exit(status)
