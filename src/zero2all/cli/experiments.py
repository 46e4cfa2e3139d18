"""z2a compare | sweep | ladder"""

from __future__ import annotations

import sys
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zero2all.cli.conventions import Json, Overrides, RecipePath, Result, resumable_command
from zero2all.errors import UsageError

if TYPE_CHECKING:
    from zero2all.charts.plot import Plot
    from zero2all.experiments import Comparison

Targets = Annotated[
    list[str],
    typer.Argument(
        help="Run directories, the directory of an experiment, or recipes to train, with overrides for all of them.",
        metavar="RUN...|RECIPE...",
    ),
]
Axes = Annotated[
    list[str] | None,
    typer.Argument(
        help="Keys and their values. Commas separate values, except inside brackets, braces and quotes.",
        metavar="[KEY=VALUE,VALUE]...",
    ),
]
Mixtures = Annotated[
    int | None,
    typer.Option(
        "--mixtures",
        min=1,
        help="Search the mixture instead of a grid, with this many: that of the recipe, equal weights, random ones.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="Compare by the weighted mean of the bits per byte of validation sources, such as zh=1,en=0.5. "
        "Default: all validation text; with --mixtures, each source of it with equal weight.",
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget", help="Length of each run: 30s, 5m, 2h, 2M-tokens or 500-steps. Default: as in the recipe."
    ),
]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds of each variant.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the experiment, below <out>/experiments.")]
Gpus = Annotated[int, typer.Option("--gpus", min=1, help="Number of GPUs of each run; on a CPU, of processes.")]
Html = Annotated[Path | None, typer.Option("--html", help="Also write a standalone HTML report of the runs.")]
Svg = Annotated[Path | None, typer.Option("--svg", help="Also write the plot to this SVG file.")]


@resumable_command
def compare(
    targets: Targets,
    budget: BudgetOption = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="Number of seeds of each recipe. Default: 1.")
    ] = None,
    name: Name = None,
    target: Target = None,
    gpus: Gpus = 1,
    html: Html = None,
    svg: Svg = None,
    json: Json = False,
) -> Result:
    """Compare runs, or train recipes and compare them.

    Prints what differs in the recipes, bits-per-byte, speed and time, and whether a difference exceeds the noise
    between seeds. Recipes are trained first; the same command resumes.

    Example: z2a compare a.yaml b.yaml --budget 5m --seeds 3
    """
    from zero2all.experiments import compare_targets, open_experiment, plan_comparison, run_experiment
    from zero2all.experiments.comparison import curves_plot
    from zero2all.experiments.target import parse_target

    weights = parse_target(target)
    overrides = [word for word in targets if "=" in word and not Path(word).exists()]
    paths = [Path(word) for word in targets if word not in overrides]
    missing = [str(path) for path in paths if not path.exists()]
    if missing or not paths:
        raise UsageError(f"nothing at {', '.join(missing)}" if missing else "give run directories or recipes")
    if all(path.is_dir() for path in paths):
        if overrides or budget or seeds or name:
            raise UsageError("runs exist already: --budget, --seeds, --name and overrides are for recipes")
        comparison = compare_targets(paths, weights)
    elif any(path.is_dir() for path in paths):
        raise UsageError("give either run directories or recipes; the recipe of a run is RUN/recipe.yaml")
    else:
        plan = plan_comparison(paths, overrides, seeds or 1, name, weights)
        run_experiment(plan, budget, gpus)
        comparison = open_experiment(plan.directory)
    return _report(comparison, curves_plot(comparison), html, svg)


@resumable_command
def sweep(
    recipe: RecipePath,
    axes: Axes = None,
    mixtures: Mixtures = None,
    seeds: Seeds = 1,
    budget: BudgetOption = None,
    name: Name = None,
    target: Target = None,
    gpus: Gpus = 1,
    html: Html = None,
    svg: Svg = None,
    json: Json = False,
) -> Result:
    """Train a grid of variants, or search the mixture.

    Prints a table sorted by bits-per-byte, and plots it over the values. A key with one value is the same for all
    variants. The same command resumes; more values or seeds extend it.

    With --mixtures, predicts bits-per-byte from the weights of the sources, says what each source gives, and writes the
    recipe with the best mixture to suggested.yaml in the directory of the experiment.

    Example: z2a sweep my.yaml train.optimizer.lr=1e-3,2e-3,4e-3 model.num_hidden_layers=3,4 --seeds 2 --budget 5m
    """
    from zero2all.experiments import open_experiment, plan_mixtures, plan_sweep, run_experiment, write_suggestion
    from zero2all.experiments.report import check_command
    from zero2all.experiments.target import parse_target
    from zero2all.recipe import load_recipe

    words, weights = axes or [], parse_target(target)
    if mixtures is None:
        plan = plan_sweep(recipe, words, seeds, name, weights)
    else:
        plan = plan_mixtures(recipe, words, mixtures, seeds, name, weights)
    run_experiment(plan, budget, gpus)
    comparison = open_experiment(plan.directory)
    result = _report(comparison, comparison.record.plot, html, svg or plan.directory / "sweep.svg")
    if mixtures is None:
        return result
    suggestion = write_suggestion(load_recipe(recipe, words), comparison.record, plan.directory)
    if suggestion is None:
        return result
    check = check_command(comparison.record, suggestion)
    text = f"suggestion written to {suggestion}\ncompare it with the recipe: {check}"
    return Result(result.data, f"{result.text}\n\n{text}")


@resumable_command
def ladder(
    recipe: RecipePath,
    overrides: Overrides = None,
    widths: Annotated[
        str, typer.Option("--widths", help="Hidden sizes of the family, such as 96,128,192,256.", metavar="N,N,...")
    ] = "",
    predict: Annotated[int | None, typer.Option("--predict", help="Hidden size whose loss is predicted.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Train the predicted size too, and compare. It does not enter the fit.")
    ] = False,
    tokens_per_parameter: Annotated[
        float, typer.Option("--tokens-per-parameter", min=0.01, help="Training tokens of each size.")
    ] = 20.0,
    seeds: Seeds = 2,
    name: Name = None,
    gpus: Gpus = 1,
    svg: Svg = None,
    json: Json = False,
) -> Result:
    """Predict the loss of a model from a family of small ones.

    Trains each width, fits bits-per-byte against compute, and predicts the next size. Each width keeps the recipe's
    head size and its ratios of depth, feed-forward size and KV heads. The prediction has a 95 % interval and reaches at
    most ten times the largest trained compute. The same command resumes.

    Example: z2a ladder my.yaml --widths 96,128,192,256 --predict 384 --verify
    """
    from zero2all.charts.svg import line_svg
    from zero2all.experiments import ladder_report, ladder_text, open_experiment, plan_ladder, run_experiment
    from zero2all.experiments.ladder import check_reach, ladder_plot, size_recipe
    from zero2all.io import write_text

    try:
        sizes = [int(part) for part in widths.split(",")]
    except ValueError:
        raise UsageError(f"--widths {widths!r}: write hidden sizes with commas, such as 96,128,192,256") from None
    if verify and predict is None:
        raise UsageError("--verify trains the size of --predict: give one")
    words = overrides or []
    predicted = None if predict is None else size_recipe(recipe, words, predict, tokens_per_parameter)
    if predicted is not None:  # before hours of training
        check_reach(predicted, [size_recipe(recipe, words, width, tokens_per_parameter) for width in sizes])
    target = predict if verify else None
    plan = plan_ladder(recipe, words, sizes, seeds, tokens_per_parameter, target, name)
    run_experiment(plan, None, gpus)
    record = open_experiment(plan.directory).record
    report, path = ladder_report(record, predicted), svg or plan.directory / "ladder.svg"
    plot = ladder_plot(record, None if predicted is None else predicted.compute)
    assert plot is not None  # there is a fit
    write_text(path, line_svg(plot))
    return Result(report, f"{ladder_text(report)}\n\n{_plot_text(plot)}\n\nplot written to {path}")


def _report(comparison: Comparison, plot: Plot | None, html: Path | None, svg: Path | None) -> Result:
    from zero2all.charts.svg import line_svg
    from zero2all.experiments import build_report, report_text
    from zero2all.io import write_text

    report = build_report(comparison)
    parts = [report_text(report)]
    if plot is not None:
        parts.append(_plot_text(plot))
    if svg is not None and plot is not None:
        write_text(svg, line_svg(plot))
        parts.append(f"plot written to {svg}")
    if html is not None:
        _write_html(comparison, html)
        parts.append(f"report written to {html}")
    return Result(report, "\n\n".join(parts))


def _plot_text(plot: Plot) -> str:
    """With colours on a terminal."""
    from rich.console import Console

    from zero2all.charts.terminal import line_text

    out = StringIO()
    Console(file=out, force_terminal=sys.stdout.isatty(), width=200).print(line_text(plot), soft_wrap=True)
    return out.getvalue().rstrip("\n")


def _write_html(comparison: Comparison, path: Path) -> None:
    from zero2all.errors import need
    from zero2all.io import write_text

    need("starlette", "track")
    from zero2all.track.html_report import report_html
    from zero2all.track.run_locations import LocalRunLocation
    from zero2all.track.run_view import RunView

    runs = [RunView(LocalRunLocation(directory)) for directory in comparison.directories.values()]
    for run in runs:
        run.read_to_end()
    write_text(path, report_html(runs))
