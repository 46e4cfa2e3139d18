"""z2a bench profile | ops | shapes | parity | loader | comm | checkpoint"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zero2all.base.environment import quiet_profiler
from zero2all.base.errors import UsageError, Z2aError
from zero2all.cli.conventions import Json, Overrides, RecipeOrPreset, RecipePath, Result, command, parse_size

if TYPE_CHECKING:
    from zero2all.bench.measurements import MeasurementReport
    from zero2all.recipe import Recipe

app = typer.Typer(help="Profile a step; time kernels, shapes, data and storage.", no_args_is_help=True)
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Write the tables to this directory, as Markdown and JSON. Default: print them."),
]
Against = Annotated[
    Path | None,
    typer.Option(
        "--against",
        help="The JSON file of an earlier run: print both, and fail if anything is over 10% slower. Default: none.",
    ),
]


@app.command()
@command
def profile(
    recipe: RecipePath,
    overrides: Overrides = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Number of timed steps, after two to warm up and before the traced.")
    ] = 5,
    out: Annotated[
        Path | None, typer.Option("--out", help="Directory of the profile. Default: profile, in the recipe's out.")
    ] = None,
    json: Json = False,
) -> Result:
    """Show where the time and memory of a training step go.

    Trains a few steps of a new run, which is removed. Writes a Chrome trace, the operators and a memory timeline.

    Example: z2a bench profile recipes/quickstart.yaml --steps 5 --out runs/profile
    """
    quiet_profiler()
    from zero2all.bench.profile import format_profile, profile_recipe
    from zero2all.recipe import load_recipe

    found = profile_recipe(load_recipe(recipe, overrides), steps, out)
    return Result({}, "") if found is None else Result(found, format_profile(found))


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
    from zero2all.bench import bench_ops, default_preset, ops_markdown
    from zero2all.bench.variants import find_sweep

    recipe = _recipe(default_preset() if target == "auto" else target, overrides)
    subsets = [names.split(",") for names in subset or ()]
    report = bench_ops(recipe, rounds, steps, compiled, subsets, [find_sweep(name) for name in sweep or ()])
    return _result("ops", report, ops_markdown(report), out)


@app.command()
@command
def shapes(
    target: RecipeOrPreset = "z2all-25m", overrides: Overrides = None, out: Out = None, json: Json = False
) -> Result:
    """Find the fastest feed-forward size near 8/3 hidden_size.

    Example: z2a bench shapes z2all-25m model.hidden_size=640 model.num_attention_heads=10
    """
    from zero2all.bench import bench_shapes, shapes_markdown

    report = bench_shapes(_recipe(target, overrides))
    return _result("shapes", report, shapes_markdown(report), out)


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
    from zero2all.bench.parity import ParityReport, ParityResult, measure_parity, parity_markdown
    from zero2all.bench.parity_cases import select_cases, select_setups

    chosen, setups = select_cases(only), select_setups(setup)
    if not any(setup.supports(case) for setup in setups for case in chosen):
        raise UsageError("none of these layouts is compared with any of these setups: leave out --only or --setup")
    outcomes: list[ParityResult] = []
    for outcome in measure_parity(chosen, steps, setups):
        outcomes.append(outcome)
        # After every layout: all of them take a while, and an interrupted benchmark keeps its results.
        result = _result("parity", ParityReport(steps, outcomes), parity_markdown(outcomes), out)
    if not all(outcome.equal for outcome in outcomes):
        raise Z2aError(f"not every layout is equal to one process\n{result.text}")
    return result


@app.command()
@command
def loader(
    recipe: RecipePath, overrides: Overrides = None, against: Against = None, out: Out = None, json: Json = False
) -> Result:
    """Time reading batches of the recipe's tokens.

    Several readers at once are the ranks of one machine. On a GPU, copies from pinned and pageable memory.

    Example: z2a bench loader runs/first --out bench
    """
    from zero2all.bench.loader import bench_loader
    from zero2all.recipe import load_recipe
    from zero2all.train.hyperparameters import fill_hyperparameters

    loaded = fill_hyperparameters(load_recipe(recipe, overrides))
    return _compared("loader", lambda: bench_loader(loaded), out, against)


@app.command()
@command
def comm(
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=2, help="Number of GPUs. Default: all, or 2 processes on a CPU.")
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option("--size", help="Message size, such as 16MiB. Repeatable. Default: 4KiB to 64MiB."),
    ] = None,
    against: Against = None,
    out: Out = None,
    json: Json = False,
) -> Result:
    """Measure the bus bandwidth of each collective.

    On GPUs with and without peer-to-peer copies. Bus bandwidth is what nccl-tests call busbw.

    Example: z2a bench comm --size 1MiB --size 64MiB
    """
    from zero2all.bench.comm import DEFAULT_SIZES, bench_comm

    sizes = [parsed for text in size or [] if (parsed := parse_size("--size", text)) is not None]
    return _compared("comm", lambda: bench_comm(gpus, sizes or DEFAULT_SIZES), out, against)


@app.command()
@command
def checkpoint(
    target: RecipeOrPreset = "z2all-25m",
    overrides: Overrides = None,
    directory: Annotated[
        Path, typer.Option("--dir", help="Where to write checkpoints: the storage to measure.")
    ] = Path("."),
    against: Against = None,
    out: Out = None,
    json: Json = False,
) -> Result:
    """Time saving and loading checkpoints.

    Example: z2a bench checkpoint z2all-25m --dir /data/checkpoints --out bench
    """
    from zero2all.bench.checkpoint import bench_checkpoint

    recipe = _recipe(target, overrides)
    return _compared("checkpoint", lambda: bench_checkpoint(recipe, directory), out, against)


def _recipe(target: str, overrides: list[str] | None) -> Recipe:
    from zero2all.recipe import load_recipe_or_preset
    from zero2all.train.hyperparameters import fill_hyperparameters

    return fill_hyperparameters(load_recipe_or_preset(target, overrides))


def _result(name: str, report: object, markdown: str, out: Path | None) -> Result:
    from zero2all.bench import write_report

    if out is not None:
        write_report(out, f"bench-{name}", report, markdown)
    return Result(report, markdown)


def _compared(name: str, run: Callable[[], MeasurementReport], out: Path | None, against: Path | None) -> Result:
    """The earlier report is read first: what is wrong with it should not be found after minutes."""
    from zero2all.bench.measurements import read_report, regressions, report_markdown

    earlier = None if against is None else read_report(against, name)
    report = run()
    result = _result(name, report, report_markdown(report, earlier), out)
    if earlier is not None and (slower := regressions(report, earlier)):
        found = "\n".join(slower)
        raise Z2aError(f"slower than {against} by more than 10%:\n{found}\n\n{result.text}")
    return result
