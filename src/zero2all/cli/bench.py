"""z2a bench profile | ops | shapes | parity | loader | comm | checkpoint | tokenize"""

from __future__ import annotations

from typing import Annotated

import typer

from zero2all.cli.bench_profile import profile
from zero2all.cli.bench_system import Out, checkpoint, comm, loader, tokenize
from zero2all.cli.conventions import Json, Overrides, RecipeOrPreset, Result, command
from zero2all.environment import quiet_profiler

app = typer.Typer(help="Profile a step; time kernels, shapes, data and storage.", no_args_is_help=True)
app.command()(profile)


@app.command()
@command
def ops(
    target: RecipeOrPreset = "auto",
    overrides: Overrides = None,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Number of measurements of each row; the fastest one is used.")
    ] = 2,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Number of timed steps in each round; the median is used.")
    ] = 5,
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Also measure with torch.compile. Default: only on a GPU."),
    ] = None,
    subset: Annotated[
        list[str] | None,
        typer.Option(
            "--subset", help="One more row with only these kernels fused, such as norm,rope. Repeatable. Default: none."
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            help="Instead of kernels, sweep a size: vocabulary, hidden, heads, micro-batch or layout. Repeatable. "
            "Default: none.",
        ),
    ] = None,
    out: Out = None,
    json: Json = False,
) -> Result:
    """Time a training step by kernel, or by size.

    With all kernels fused, all but one, one replaced by another, only a few.

    The default auto is a small preset on a CPU and the reference shape on a GPU.

    Example: z2a bench ops z2all-10m train.batch_tokens=4096 --sweep vocabulary --sweep layout --out bench
    """
    quiet_profiler()
    from zero2all.bench import bench_ops, default_preset, ops_markdown, write_report
    from zero2all.bench.variants import find_sweep
    from zero2all.recipe import load_recipe_or_preset
    from zero2all.train.hyperparameters import fill_hyperparameters

    recipe = fill_hyperparameters(load_recipe_or_preset(default_preset() if target == "auto" else target, overrides))
    subsets = [names.split(",") for names in subset or ()]
    report = bench_ops(recipe, rounds, steps, compiled, subsets, [find_sweep(name) for name in sweep or ()])
    markdown = ops_markdown(report)
    if out is not None:
        write_report(out, "bench-ops", report, markdown)
    return Result(report, markdown)


@app.command()
@command
def shapes(
    target: RecipeOrPreset = "z2all-25m",
    overrides: Overrides = None,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Number of measurements of each size; the fastest one is used.")
    ] = 9,
    step: Annotated[
        int, typer.Option("--step", min=0, help="Spacing of the sizes to try. 0 chooses it automatically.")
    ] = 0,
    out: Out = None,
    json: Json = False,
) -> Result:
    """Find the fastest feed-forward size near 8/3 hidden_size.

    Example: z2a bench shapes z2all-25m model.hidden_size=640 model.num_attention_heads=10
    """
    from zero2all.bench import bench_shapes, shapes_markdown, write_report
    from zero2all.recipe import load_recipe_or_preset
    from zero2all.train.hyperparameters import fill_hyperparameters

    report = bench_shapes(fill_hyperparameters(load_recipe_or_preset(target, overrides)), rounds, step)
    markdown = shapes_markdown(report)
    if out is not None:
        write_report(out, "bench-shapes", report, markdown)
    return Result(report, markdown)


@app.command()
@command
def parity(
    steps: Annotated[int, typer.Option("--steps", min=1, help="Number of training steps to compare.")] = 20,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            help="Run only this layout, or those that match a pattern such as 'PP 2*'. Repeatable. Default: all.",
        ),
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(
            "--setup", help="Run only this training setup, or those that match a pattern. Repeatable. Default: all."
        ),
    ] = None,
    out: Out = None,
    json: Json = False,
) -> Result:
    """Check numerical parity of every parallel layout on CPU.

    Each layout trains a small model and is compared with a single process, step by step.

    Example: z2a bench parity --only 'FSDP*' --only 'TP 2'
    """
    from zero2all.bench import write_report
    from zero2all.bench.parity import ParityReport, ParityResult, measure_parity, parity_markdown
    from zero2all.bench.parity_cases import select_cases, select_setups
    from zero2all.errors import UsageError, Z2aError

    chosen, setups = select_cases(only), select_setups(setup)
    if not any(setup.supports(case) for setup in setups for case in chosen):
        raise UsageError("none of these layouts is compared with any of these setups: leave out --only or --setup")
    outcomes: list[ParityResult] = []
    for outcome in measure_parity(chosen, steps, setups):
        outcomes.append(outcome)
        report, markdown = ParityReport(steps, outcomes), parity_markdown(outcomes)
        # After every layout: all of them take a while, and an interrupted benchmark keeps its results.
        if out is not None:
            write_report(out, "bench-parity", report, markdown)
    if not all(outcome.equal for outcome in outcomes):
        raise Z2aError(f"not every layout is equal to one process\n{markdown}")
    return Result(report, markdown)


for system_command in (loader, comm, checkpoint, tokenize):
    app.command()(system_command)
