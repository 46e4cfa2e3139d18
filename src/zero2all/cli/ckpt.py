"""z2a ckpt ls | verify | rm | diff | interval"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Result, RunPath, command

app = typer.Typer(help="What is kept of a run's state.", no_args_is_help=True)


@app.command()
@command
def ls(run: RunPath, json: Json = False) -> Result:
    """List checkpoints, durable and in this machine's memory.

    Example: z2a ckpt ls runs/first
    """
    from zero2all.resilience.inspect import kept_states
    from zero2all.train import Run
    from zero2all.units import show_bytes

    opened = Run.open(run)
    states = kept_states(opened.checkpoints, opened.memory)
    lines = [f"{'step':>10}  {'where':<8} {'when':<19} {'size':>8}  whole  notes"]
    for row in states:
        when = datetime.fromtimestamp(row["time"]).strftime("%Y-%m-%d %H:%M:%S") if row["time"] else "?"
        whole = "yes" if row["whole"] else "NO"
        size = show_bytes(row["bytes"])
        lines.append(
            f"{row['step']:>10}  {row['where']:<8} {when:<19} {size:>8}  {whole:<5}  {', '.join(row['notes'])}"
        )
    return Result({"run": str(opened.directory), "states": states}, "\n".join(lines))


@app.command()
@command
def verify(
    run: RunPath,
    step: Annotated[int | None, typer.Option("--step", help="Only this one; all if not given.")] = None,
    json: Json = False,
) -> Result:
    """Compute every checksum again; what does not match is named, and the exit status is 1.

    Example: z2a ckpt verify runs/first
    """
    from zero2all.errors import UsageError, Z2aError
    from zero2all.resilience.inspect import kept_states, problems
    from zero2all.train import Run

    opened = Run.open(run)
    steps = {row["step"] for row in kept_states(opened.checkpoints, opened.memory)}
    if step is not None and step not in steps:
        raise UsageError(f"nothing is kept of step {step}; steps there: {', '.join(map(str, sorted(steps))) or 'none'}")
    found = problems(opened.checkpoints, opened.memory, step)
    if found:
        raise Z2aError("\n".join(f"{where}: {problem}" for where, problem in found.items()))
    checked = sorted(steps if step is None else {step})
    return Result({"steps": checked, "problems": {}}, f"whole: {', '.join(map(str, checked)) or 'nothing is there'}")


@app.command()
@command
def rm(
    run: RunPath,
    step: Annotated[int, typer.Option("--step", help="Which one.")],
    force: Annotated[bool, typer.Option("--force", help="Also the only whole one.")] = False,
    json: Json = False,
) -> Result:
    """Remove a durable checkpoint.

    Example: z2a ckpt rm runs/first --step 400
    """
    from zero2all.resilience.inspect import remove
    from zero2all.train import Run

    opened = Run.open(run)
    remove(opened.checkpoints, step, force)
    return Result({"removed": step}, f"the checkpoint of step {step} is removed")


@app.command()
@command
def diff(
    run: RunPath,
    one: Annotated[int, typer.Argument(help="A step.", metavar="STEP")],
    other: Annotated[int, typer.Argument(help="Another step.", metavar="STEP")],
    top: Annotated[int, typer.Option("--top", min=1, help="How many parameters to print.")] = 20,
    json: Json = False,
) -> Result:
    """Show how far the parameters of two checkpoints lie apart: largest difference, and relative to the largest value.

    Example: z2a ckpt diff runs/first 400 500
    """
    from zero2all.resilience.inspect import differences
    from zero2all.train import Run

    rows = differences(Run.open(run).checkpoints, one, other)
    lines = [f"{row['largest']:>12.4e} {row['relative']:>12.4e}  {row['parameter']}" for row in rows[:top]]
    return Result({"steps": [one, other], "parameters": rows}, "\n".join([f"{'largest':>12} {'relative':>12}", *lines]))


@app.command()
@command
def interval(
    stall: Annotated[
        float, typer.Option("--stall", min=0.001, help="Seconds that training stands still for a checkpoint.")
    ] = 1.0,
    recovery: Annotated[
        float, typer.Option("--recovery", min=0, help="Seconds from a failure to the first new step.")
    ] = 60.0,
    json: Json = False,
) -> Result:
    """Work out the best time between checkpoints and the goodput to expect at published failure rates.

    Example: z2a ckpt interval --stall 0.5 --recovery 30
    """
    from zero2all.resilience.expect import markdown, table

    rows = table(stall, recovery)
    return Result({"stall": stall, "recovery": recovery, "rows": rows}, markdown(rows, stall, recovery))
