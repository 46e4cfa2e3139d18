"""z2a compare"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zero2all.base.errors import UsageError
from zero2all.cli.conventions import Json, Result, resumable_command

if TYPE_CHECKING:
    from zero2all.base.charts.plot import Plot
    from zero2all.experiments import Comparison, ExperimentPlan

Targets = Annotated[
    list[str],
    typer.Argument(
        help="Run directories, the directory of an experiment, or recipes to train, with overrides for all of them. "
        "Commas separate values of a key, except inside brackets, braces and quotes.",
        metavar="RUN...|RECIPE... [KEY=VALUE,VALUE]...",
    ),
]
Mixtures = Annotated[
    int | None,
    typer.Option(
        "--mixtures",
        min=1,
        help="Search the mixture instead of a grid, with this many: the recipe's, equal weights, random ones. "
        "Default: no search.",
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
Widths = Annotated[
    str | None,
    typer.Option(
        "--widths",
        help="Train these hidden sizes and fit a scaling law, such as 96,128,192,256. Default: none.",
        metavar="N,N,...",
    ),
]
Predict = Annotated[
    int | None,
    typer.Option(
        "--predict", help="With --widths: predict this hidden size, up to ten times the largest compute. Default: none."
    ),
]
Verify = Annotated[
    bool, typer.Option("--verify", help="Train the predicted size too, and compare. It does not enter the fit.")
]
TokensPerParameter = Annotated[
    float, typer.Option("--tokens-per-parameter", min=0.01, help="With --widths: training tokens of each size.")
]
Name = Annotated[
    str | None,
    typer.Option("--name", help="Name of the experiment, below <out>/experiments. Default: after what differs."),
]
Gpus = Annotated[int, typer.Option("--gpus", min=1, help="Number of GPUs of each run; on a CPU, of processes.")]
Svg = Annotated[
    Path | None,
    typer.Option("--svg", help="Also write the plot to this SVG file. Default: in the experiment's directory."),
]


Seeds = Annotated[
    int | None,
    typer.Option(
        "--seeds",
        min=1,
        help="Number of seeds of each variant; more show smaller differences. Default: 1; with --widths 2.",
    ),
]


@resumable_command
def compare(
    targets: Targets,
    seeds: Seeds = None,
    budget: BudgetOption = None,
    name: Name = None,
    target: Target = None,
    gpus: Gpus = 1,
    svg: Svg = None,
    mixtures: Mixtures = None,
    widths: Widths = None,
    predict: Predict = None,
    verify: Verify = False,
    tokens_per_parameter: TokensPerParameter = 20.0,
    json: Json = False,
) -> Result:
    """Compare runs, recipes, grids of values, mixtures or sizes.

    Prints what differs in the recipes, bits-per-byte, speed and time, and whether a difference exceeds the noise
    between seeds. Recipes are trained first; the same command resumes, and more values or seeds extend it.

    KEY=VALUE,VALUE trains one recipe with each value; several such keys are a grid. A key with one value is the same
    for all variants.

    --mixtures predicts bits-per-byte from the weights of the sources, says what each source gives, and writes the
    recipe with the best mixture to suggested.yaml in the directory of the experiment.

    --widths trains a family of small models and fits bits-per-byte against compute; --predict gives the next size with
    a 95% interval. Each width keeps the recipe's head size and its ratios of depth, feed-forward size and KV heads.

    Example: z2a compare a.yaml b.yaml --budget 5m --seeds 3

    Example: z2a compare my.yaml train.optimizer.lr=1e-3,2e-3,4e-3 model.num_hidden_layers=3,4 --seeds 2

    Example: z2a compare my.yaml --widths 96,128,192,256 --predict 384 --verify
    """
    from zero2all.experiments import compare_targets, plan_comparison, plan_mixtures, plan_sweep
    from zero2all.experiments.comparison import curves_plot
    from zero2all.experiments.target import parse_target
    from zero2all.experiments.variants import parse_axis

    weights = parse_target(target)
    words = [word for word in targets if "=" in word and not Path(word).exists()]
    paths = [Path(word) for word in targets if word not in words]
    missing = [str(path) for path in paths if not path.exists()]
    if missing or not paths:
        raise UsageError(f"nothing at {', '.join(missing)}" if missing else "give run directories or recipes")
    if widths is not None:
        if (budget, target, mixtures) != (None, None, None):
            raise UsageError("--budget, --target and --mixtures do not go with --widths")
        family = Family(_one(paths, "--widths"), words, widths, predict, verify, tokens_per_parameter)
        return _train_family(family, seeds or 2, name, gpus, svg)
    if predict is not None or verify:
        raise UsageError("--predict and --verify are for --widths")
    is_grid = len(paths) == 1 and any(len(parse_axis(word)[1]) > 1 for word in words)
    if mixtures is None and not is_grid and all(path.is_dir() for path in paths):
        if words or budget or seeds or name:
            raise UsageError("runs exist already: --budget, --seeds, --name and overrides are for recipes")
        comparison = compare_targets(paths, weights)
        return _report(comparison, curves_plot(comparison), svg)
    if mixtures is not None:
        plan = plan_mixtures(_one(paths, "--mixtures"), words, mixtures, seeds or 1, name, weights)
    elif is_grid:
        plan = plan_sweep(paths[0], words, seeds or 1, name, weights)
    elif any(path.is_dir() for path in paths):
        raise UsageError("give either run directories or recipes; the recipe of a run is RUN/recipe.yaml")
    else:
        plan = plan_comparison(paths, words, seeds or 1, name, weights)
    return _train(plan, budget, gpus, svg)


def _train(plan: ExperimentPlan, budget: str | None, gpus: int, svg: Path | None) -> Result:
    from zero2all.experiments import open_experiment, run_experiment, write_suggestion
    from zero2all.experiments.comparison import curves_plot
    from zero2all.experiments.report import check_command
    from zero2all.recipe import load_recipe
    from zero2all.track.experiment_record import MIXTURE_SEARCH

    run_experiment(plan, budget, gpus)
    comparison = open_experiment(plan.directory)
    record = comparison.record
    if record.kind == "compare":
        return _report(comparison, curves_plot(comparison), svg)
    result = _report(comparison, record.plot, svg or plan.directory / "sweep.svg")
    given = plan.variants[0].record
    suggestion = None
    if record.kind == MIXTURE_SEARCH:
        recipe = load_recipe(Path(given.recipe), given.overrides)
        suggestion = write_suggestion(recipe, record, plan.directory)
    if suggestion is None:
        return result
    text = f"suggestion written to {suggestion}\ncompare it with the recipe: {check_command(record, suggestion)}"
    return Result(result.data, f"{result.text}\n\n{text}")


def _one(paths: list[Path], option: str) -> Path:
    if len(paths) > 1:
        raise UsageError(f"{option} is for one recipe")
    return paths[0]


@dataclass(frozen=True)
class Family:
    """Sizes of one recipe, and the one that is predicted from them."""

    recipe: Path
    words: list[str]
    widths: str
    predict: int | None
    verify: bool
    tokens_per_parameter: float


def _train_family(family: Family, seeds: int, name: str | None, gpus: int, svg: Path | None) -> Result:
    from zero2all.base.charts.svg import line_svg
    from zero2all.base.io import write_text
    from zero2all.experiments import ladder_report, ladder_text, open_experiment, plan_ladder, run_experiment
    from zero2all.experiments.ladder import check_reach, ladder_plot, size_recipe

    recipe, words, tokens = family.recipe, family.words, family.tokens_per_parameter
    try:
        sizes = [int(part) for part in family.widths.split(",")]
    except ValueError:
        raise UsageError(
            f"--widths {family.widths!r}: write hidden sizes with commas, such as 96,128,192,256"
        ) from None
    if family.verify and family.predict is None:
        raise UsageError("--verify trains the size of --predict: give one")
    predicted = None if family.predict is None else size_recipe(recipe, words, family.predict, tokens)
    if predicted is not None:  # before hours of training
        check_reach(predicted, [size_recipe(recipe, words, width, tokens) for width in sizes])
    target = family.predict if family.verify else None
    plan = plan_ladder(recipe, words, sizes, seeds, tokens, target, name)
    run_experiment(plan, None, gpus)
    record = open_experiment(plan.directory).record
    report, path = ladder_report(record, predicted), svg or plan.directory / "ladder.svg"
    plot = ladder_plot(record, None if predicted is None else predicted.compute)
    assert plot is not None  # there is a fit
    write_text(path, line_svg(plot))
    return Result(report, f"{ladder_text(report)}\n\n{_plot_text(plot)}\n\nplot written to {path}")


def _report(comparison: Comparison, plot: Plot | None, svg: Path | None) -> Result:
    from zero2all.base.charts.svg import line_svg
    from zero2all.base.io import write_text
    from zero2all.experiments import build_report, report_text

    report = build_report(comparison)
    parts = [report_text(report)]
    if plot is not None:
        parts.append(_plot_text(plot))
    if svg is not None and plot is not None:
        write_text(svg, line_svg(plot))
        parts.append(f"plot written to {svg}")
    return Result(report, "\n\n".join(parts))


def _plot_text(plot: Plot) -> str:
    """With colours on a terminal."""
    from rich.console import Console

    from zero2all.base.charts.terminal import line_text

    out = StringIO()
    Console(file=out, force_terminal=sys.stdout.isatty(), width=200).print(line_text(plot), soft_wrap=True)
    return out.getvalue().rstrip("\n")
