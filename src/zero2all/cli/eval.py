"""z2a eval loss | probes | bench | watch | report | stories | lm-eval"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from zero2all.cli import eval_bench, eval_lm_eval, eval_probes, eval_report, eval_watch
from zero2all.cli.conventions import Json, Result, RunPath, command
from zero2all.cli.eval_bench import Target
from zero2all.cli.groups import EvalGroup
from zero2all.cli.runs import CheckpointStep, PipelineParallel, TensorParallel
from zero2all.errors import UsageError

app = typer.Typer(cls=EvalGroup, help="Evaluate trained models.", no_args_is_help=True)


@app.callback()
def eval_group() -> None:
    """Evaluate trained models."""


@app.command("loss")
@command
def eval_loss(
    target: Target,
    step: CheckpointStep = None,
    test_set: Annotated[
        list[str] | None,
        typer.Option(
            "--test-set",
            help="Also evaluate on these files: a name and a file, directory, glob or URL. Repeatable. Default: none.",
            metavar="NAME=PATH",
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe", help="Use the validation set of this recipe. Default: that of the run.", metavar="RECIPE"
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            min=1,
            help="Score each document alone, with a sliding window of this many tokens. Default: packed sequences, as "
            "in training; without a recipe, a window of at most 2048.",
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option("--stride", min=1, help="Tokens by which the window moves. Default: half of it."),
    ] = None,
    tp: TensorParallel = 1,
    pp: PipelineParallel = 1,
    json: Json = False,
) -> Result:
    """Measure bits-per-byte on the validation set and test sets.

    Under 'z2a launch', ranks share the work.

    Example: z2a eval loss runs/first --test-set wiki=data/wiki.jsonl
    """
    from zero2all.console import console
    from zero2all.evals.loss_report import LossOptions, format_loss, report_loss
    from zero2all.evals.target import find_target
    from zero2all.parallel import ParallelModel
    from zero2all.recipe import ParallelRecipe, load_recipe

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    console.quiet = rank != 0
    loaded = None if recipe is None else load_recipe(recipe)
    options = LossOptions(loaded, _parse_test_sets(test_set or []), window, stride)
    found = find_target(target, step)
    is_parallel = max(tp * pp, ranks) > 1
    model = found.load_parallel_model(ParallelRecipe(tp=tp, pp=pp, sp=False)) if is_parallel else found.load_model()
    report = report_loss(found, model, options)
    if isinstance(model, ParallelModel):
        model.mesh.close()
    if rank != 0:  # only one of several ranks reports it
        raise typer.Exit
    return Result(report.to_json(), format_loss(report))


def _parse_test_sets(words: list[str]) -> dict[str, str]:
    from pydantic import ValidationError

    from zero2all.recipe import EvalsRecipe

    pairs = [word.partition("=") for word in words]
    for word, (name, _, path) in zip(words, pairs, strict=True):
        if not name or not path:
            raise UsageError(f"--test-set {word!r}: write NAME=PATH")
    try:
        return EvalsRecipe.model_validate({"test_sets": {name: path for name, _, path in pairs}}).test_sets
    except ValidationError as error:
        raise UsageError(f"--test-set: {error.errors()[0]['msg']}") from error


app.command("probes")(eval_probes.eval_probes)
app.command("bench")(eval_bench.eval_bench)
app.command("watch")(eval_watch.eval_watch)
app.command("report")(eval_report.eval_report)
app.command("lm-eval")(eval_lm_eval.eval_lm_eval)


@app.command("stories")
@command
def eval_stories(
    run: RunPath,
    count: Annotated[int, typer.Option("--count", min=1, help="Number of stories to generate.")] = 200,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
    step: CheckpointStep = None,
    json: Json = False,
) -> Result:
    """Check grammar, consistency and sums of generated stories.

    For models that are trained on the built-in stories, as by 'z2a quickstart' without --corpus.

    Example: z2a eval stories runs/first
    """
    from zero2all.generation import evaluate_stories, story_quality_line
    from zero2all.train import Run

    opened = Run.open(run)
    evaluation = evaluate_stories(opened.load_model(step), opened.tokenizer(), count, seed)
    return Result(evaluation, story_quality_line(evaluation.quality))
