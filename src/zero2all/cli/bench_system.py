"""z2a bench loader | comm | checkpoint | tokenize"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zero2all.cli.conventions import Json, Overrides, RecipeOrPreset, RecipePath, Result, command, parse_size

if TYPE_CHECKING:
    from zero2all.bench.measurements import BenchReport

Out = Annotated[
    Path | None,
    typer.Option("--out", help="Write the tables to this directory, as Markdown and JSON. Default: print them."),
]
Against = Annotated[
    Path | None,
    typer.Option(
        "--against", help="The JSON file of an earlier run: print both, and fail if anything is slower. Default: none."
    ),
]
Tolerance = Annotated[
    float, typer.Option("--tolerance", min=0.0, max=1.0, help="How much slower counts as a regression, as a fraction.")
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Number of measurements of each row.")]


def _run(name: str, run: Callable[[], BenchReport], out: Path | None, against: Path | None, tolerance: float) -> Result:
    """The earlier report is read first: what is wrong with it should not be found after minutes."""
    from zero2all.bench import write_report
    from zero2all.bench.measurements import read_report, regressions, report_markdown
    from zero2all.errors import Z2aError

    earlier = None if against is None else read_report(against, name)
    report = run()
    markdown = report_markdown(report, earlier)
    if out is not None:
        write_report(out, f"bench-{report.benchmark}", report, markdown)
    if earlier is not None and (slower := regressions(report, earlier, tolerance)):
        found = "\n".join(slower)
        raise Z2aError(f"slower than {against} by more than {100 * tolerance:.0f} %:\n{found}\n\n{markdown}")
    return Result(report, markdown)


@command
def loader(
    recipe: RecipePath,
    overrides: Overrides = None,
    batches: Annotated[int, typer.Option("--batches", min=1, help="Number of batches to read.")] = 50,
    rounds: Rounds = 3,
    against: Against = None,
    tolerance: Tolerance = 0.1,
    out: Out = None,
    json: Json = False,
) -> Result:
    """Time reading batches of the recipe's tokens.

    Several readers at once are the ranks of one machine. On a GPU, copies from pinned and pageable memory.

    Example: z2a bench loader runs/first --batches 100 --out bench
    """
    from zero2all.bench.loader import bench_loader
    from zero2all.recipe import load_recipe
    from zero2all.train.hyperparameters import fill_hyperparameters

    loaded = fill_hyperparameters(load_recipe(recipe, overrides))
    return _run("loader", lambda: bench_loader(loaded, batches, rounds), out, against, tolerance)


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
    tolerance: Tolerance = 0.1,
    out: Out = None,
    json: Json = False,
) -> Result:
    """Measure the bus bandwidth of each collective.

    On GPUs with and without peer-to-peer copies. Bus bandwidth is what nccl-tests call busbw.

    Example: z2a bench comm --size 1MiB --size 64MiB
    """
    from zero2all.bench.comm import DEFAULT_SIZES, bench_comm

    sizes = [parsed for text in size or [] if (parsed := parse_size("--size", text)) is not None]
    return _run("comm", lambda: bench_comm(gpus, sizes or DEFAULT_SIZES), out, against, tolerance)


@command
def checkpoint(
    target: RecipeOrPreset = "z2all-25m",
    overrides: Overrides = None,
    directory: Annotated[
        Path, typer.Option("--dir", help="Where to write checkpoints: the storage to measure.")
    ] = Path("."),
    rounds: Rounds = 5,
    against: Against = None,
    tolerance: Tolerance = 0.1,
    out: Out = None,
    json: Json = False,
) -> Result:
    """Time saving and loading checkpoints.

    Example: z2a bench checkpoint z2all-25m --dir /data/checkpoints --out bench
    """
    from zero2all.bench.checkpoint import bench_checkpoint
    from zero2all.recipe import load_recipe_or_preset
    from zero2all.train.hyperparameters import fill_hyperparameters

    recipe = fill_hyperparameters(load_recipe_or_preset(target, overrides))
    return _run("checkpoint", lambda: bench_checkpoint(recipe, directory, rounds), out, against, tolerance)


@command
def tokenize(
    tokenizer: Annotated[Path, typer.Argument(help="Directory of a tokenizer.", metavar="TOKENIZER")],
    files: Annotated[list[Path], typer.Argument(help="Files of UTF-8 text.", metavar="FILE...", exists=True)],
    megabytes: Annotated[float, typer.Option("--mb", min=0.01, help="Amount of text to encode.")] = 20.0,
    rounds: Rounds = 3,
    against: Against = None,
    tolerance: Tolerance = 0.1,
    out: Out = None,
    json: Json = False,
) -> Result:
    """Time a tokenizer on your text.

    Example: z2a bench tokenize runs/first/tokenizer raw/*.txt --out bench
    """
    from zero2all.bench.tokenize import bench_tokenize

    run = partial(bench_tokenize, tokenizer, files, megabytes, rounds)
    return _run("tokenize", run, out, against, tolerance)
