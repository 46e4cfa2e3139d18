"""z2a ckpt ls | verify | rm | diff"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Result, RunPath, command

SHOWN_PARAMETERS = 20  # of a comparison

app = typer.Typer(help="List, verify, compare and remove checkpoints.", no_args_is_help=True)


@app.command()
@command
def ls(run: RunPath, json: Json = False) -> Result:
    """List durable and in-memory checkpoints.

    Example: z2a ckpt ls runs/first
    """
    from zero2all.base.units import show_bytes
    from zero2all.checkpoint.inspection import list_checkpoints
    from zero2all.train import Run

    opened = Run.open(run)
    states = list_checkpoints(opened.checkpoints, opened.flash_dir)
    lines = [f"{'step':>10}  {'where':<8} {'when':<19} {'size':>8}  valid  notes"]
    for row in states:
        when = datetime.fromtimestamp(row.time).strftime("%Y-%m-%d %H:%M:%S") if row.time else "?"
        valid = "yes" if row.whole else "NO"
        size = show_bytes(row.bytes)
        lines.append(f"{row.step:>10}  {row.where:<8} {when:<19} {size:>8}  {valid:<5}  {', '.join(row.notes)}")
    return Result({"run": str(opened.directory), "states": states}, "\n".join(lines))


@app.command()
@command
def verify(
    run: RunPath,
    step: Annotated[int | None, typer.Argument(help="The step of the only checkpoint to verify.")] = None,
    json: Json = False,
) -> Result:
    """Verify the checksums of checkpoints.

    The exit status is 1 if any does not match.

    Example: z2a ckpt verify runs/first
    """
    from zero2all.base.errors import UsageError, Z2aError
    from zero2all.checkpoint.inspection import find_problems, list_checkpoints
    from zero2all.train import Run

    opened = Run.open(run)
    steps = {row.step for row in list_checkpoints(opened.checkpoints, opened.flash_dir)}
    if step is not None and step not in steps:
        raise UsageError(f"no checkpoint of step {step}; there are {', '.join(map(str, sorted(steps))) or 'none'}")
    found = find_problems(opened.checkpoints, opened.flash_dir, step)
    if found:
        raise Z2aError("\n".join(f"{where}: {problem}" for where, problem in found.items()))
    checked = sorted(steps if step is None else {step})
    return Result({"steps": checked, "problems": {}}, f"valid: {', '.join(map(str, checked)) or 'nothing is there'}")


@app.command()
@command
def rm(
    run: RunPath,
    step: Annotated[int, typer.Argument(help="The step whose checkpoint is removed.", metavar="STEP")],
    force: Annotated[
        bool, typer.Option("--force", help="Remove it even if no other valid checkpoint is left.")
    ] = False,
    json: Json = False,
) -> Result:
    """Remove a durable checkpoint.

    Example: z2a ckpt rm runs/first 400
    """
    from zero2all.checkpoint.inspection import remove_checkpoint
    from zero2all.train import Run

    opened = Run.open(run)
    remove_checkpoint(opened.checkpoints, step, force=force)
    return Result({"removed": step}, f"the checkpoint of step {step} is removed")


@app.command()
@command
def diff(
    run: RunPath,
    one: Annotated[int, typer.Argument(help="The step of the first checkpoint.", metavar="STEP")],
    other: Annotated[int, typer.Argument(help="The step of the second checkpoint.", metavar="STEP")],
    json: Json = False,
) -> Result:
    """Compare the parameters of two checkpoints.

    The table lists the 20 parameters that differ most: the largest absolute difference, also relative to the largest
    value. --json has all of them.

    Example: z2a ckpt diff runs/first 400 500
    """
    from zero2all.checkpoint.inspection import compare_checkpoints
    from zero2all.train import Run

    rows = compare_checkpoints(Run.open(run).checkpoints, one, other)
    lines = [f"{row.largest:>12.4e} {row.relative:>12.4e}  {row.parameter}" for row in rows[:SHOWN_PARAMETERS]]
    return Result({"steps": [one, other], "parameters": rows}, "\n".join([f"{'largest':>12} {'relative':>12}", *lines]))
