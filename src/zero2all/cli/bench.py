"""z2a bench ops | shapes | parity"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Overrides, Result, Target, command

app = typer.Typer(help="Measure the machine at hand.", no_args_is_help=True)

Out = Annotated[Path | None, typer.Option("--out", help="A directory for the tables as Markdown and JSON.")]


@app.command()
@command
def ops(
    target: Target = "auto",
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of every row; the fastest counts.")] = 3,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps in a turn; their median counts.")] = 5,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Measure torch.compile too.")] = True,
    out: Out = None,
    json: Json = False,
) -> Result:
    """Time a training step with every op plain, every op fused, and every op fused but one.

    auto is a small preset on CPU and the reference shape on a GPU.

    Example: z2a bench ops z2all-10m train.batch_tokens=4096 --out bench
    """
    from zero2all.bench import bench_ops, ops_markdown, shape_for_this_machine, write_report
    from zero2all.recipe import recipe_or_preset

    recipe = recipe_or_preset(shape_for_this_machine() if target == "auto" else target, overrides)
    report = bench_ops(recipe, rounds, steps, compiled)
    markdown = ops_markdown(report)
    if out is not None:
        write_report(out, "bench-ops", report, markdown)
    return Result(report, markdown)


@app.command()
@command
def shapes(
    target: Target = "z2all-25m",
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of every size; the fastest counts.")] = 9,
    step: Annotated[int, typer.Option("--step", min=0, help="Distance between sizes; 0 chooses.")] = 0,
    out: Out = None,
    json: Json = False,
) -> Result:
    """Time the feed-forward matrix products around 8/3 of the hidden size and name the best size nearby.

    Example: z2a bench shapes z2all-25m model.hidden_size=640 model.n_heads=10
    """
    from zero2all.bench import bench_shapes, shapes_markdown, write_report
    from zero2all.recipe import recipe_or_preset

    report = bench_shapes(recipe_or_preset(target, overrides), rounds, step)
    markdown = shapes_markdown(report)
    if out is not None:
        write_report(out, "bench-shapes", report, markdown)
    return Result(report, markdown)


@app.command()
@command
def parity(
    steps: Annotated[int, typer.Option("--steps", min=1)] = 20,
    only: Annotated[str | None, typer.Option("--only", help="Layouts whose name holds this, such as 'PP 2'.")] = None,
    out: Out = None,
    json: Json = False,
) -> Result:
    """Train a small model in every layout on this machine's CPU and compare each step with one process.

    Example: z2a bench parity --only FSDP
    """
    from zero2all.bench import write_report
    from zero2all.bench.parity import Outcome, as_data, measure, table
    from zero2all.bench.parity_cases import cases
    from zero2all.errors import UsageError, Z2aError

    chosen = [case for case in cases() if only is None or only in case.name]
    if not chosen:
        raise UsageError(f"no layout is called {only!r}; there are {', '.join(case.name for case in cases())}")
    outcomes: list[Outcome] = []
    for outcome in measure(chosen, steps):
        outcomes.append(outcome)
        report, markdown = {"steps": steps, "outcomes": as_data(outcomes)}, table(outcomes)
        if out is not None:  # after every run: the whole takes a while, and one that is broken off keeps what it has
            write_report(out, "bench-parity", report, markdown)
    if not all(outcome.equal for outcome in outcomes):
        raise Z2aError(f"not every layout is equal to one process\n{markdown}")
    return Result(report, markdown)
