"""z2a eval loss | probes | bench | watch | report | lm-eval | stories"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer.core import TyperGroup

from zero2all.base.errors import UsageError, Z2aError
from zero2all.cli.conventions import (
    CheckpointStep,
    Json,
    PipelineParallel,
    Result,
    RunPath,
    Target,
    TensorParallel,
    command,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zero2all.base.plugins import PluginSpec


class EvalGroup(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            words = " ".join(["z2a eval loss", *args])
            raise typer.BadParameter(f"'z2a eval' is a group of commands: write '{words}'", ctx)
        return super().resolve_command(ctx, args)


Suites = Annotated[
    list[str] | None,
    typer.Option(
        "--suite",
        help="A YAML file of probes, or one of the built-in suites english, chinese, stories. Repeatable. "
        "Default: english and chinese; for a run on the built-in stories, stories.",
        metavar="FILE|NAME",
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Argument(
        help="Names of benchmarks. Default: evals.benchmarks, or all in the directory.", metavar="[TASK]..."
    ),
]
Forms = Annotated[
    list[str] | None,
    typer.Option(
        "--form",
        help="How multiple-choice questions are asked: score the text of each option (cloze), its letter (letter), or "
        "the letter after a chain of thought (cot). Repeat it to compare. Default: the task's.",
        metavar="cloze|letter|cot",
    ),
]

app = typer.Typer(cls=EvalGroup, help="Evaluate trained models.", no_args_is_help=True)


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
        typer.Option("--recipe", help="Use the validation set of this recipe. Default: the run's.", metavar="RECIPE"),
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
        int | None, typer.Option("--stride", min=1, help="Tokens by which the window moves. Default: half of it.")
    ] = None,
    tp: TensorParallel = 1,
    pp: PipelineParallel = 1,
    json: Json = False,
) -> Result:
    """Measure bits-per-byte on the validation set and test sets.

    Under 'z2a launch', ranks share the work.

    Example: z2a eval loss runs/first --test-set wiki=data/wiki.jsonl
    """
    from zero2all.base.console import console
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


@app.command("probes")
@command
def eval_probes(target: Target, suite: Suites = None, json: Json = False) -> Result:
    """Measure probabilities of continuations and sentences.

    The values of a run's newest checkpoint are added to its evals.jsonl, and 'z2a watch' shows them as curves. Once
    several checkpoints are evaluated, as by 'z2a eval watch', a test tells which probes trend as expected.

    Example: z2a eval probes runs/first
    """
    from zero2all.evals.probe_suite import load_suite
    from zero2all.evals.probes import evaluate_probes, format_probes

    report = evaluate_probes(target, [load_suite(name) for name in suite or []])
    return Result(report, format_probes(report))


@app.command("bench")
@command
def eval_bench(
    target: Target,
    tasks: Tasks = None,
    data: Annotated[Path, typer.Option("--data", help="The directory with the files of the benchmarks.")] = Path(
        "eval"
    ),
    form: Forms = None,
    shots: Annotated[
        int | None, typer.Option("--shots", min=0, help="Number of examples in a prompt. Default: the task's.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", min=1, help="Ask this many items of each task, chosen at random, to save time. Default: all."
        ),
    ] = None,
    mutate: Annotated[
        bool,
        typer.Option("--mutate", help="Also ask changed questions, on which a model that memorized them does worse."),
    ] = False,
    train_on_questions: Annotated[
        bool,
        typer.Option(
            "--train-on-questions",
            help="Also ask after training a copy of the model on the questions without their answers, which makes a "
            "model that has seen the answers recall them.",
        ),
    ] = False,
    contamination: Annotated[
        bool,
        typer.Option(
            "--contamination", help="Compare items with the training documents, and evaluate the clean ones apart."
        ),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option("--against", help="A second model: the differences, with confidence intervals. Default: none."),
    ] = None,
    step: CheckpointStep = None,
    unsafe_code: Annotated[
        bool,
        typer.Option("--unsafe-code", help="Run code that the model writes without a sandbox, if none works here."),
    ] = False,
    json: Json = False,
) -> Result:
    """Evaluate a model on benchmarks in local files.

    Prints accuracy, chance and the bits-per-byte of the right answer, which improves long before accuracy does.

    Example: z2a eval bench runs/first arc_easy cmmlu --data eval --limit 500
    """
    from zero2all.evals import open_target
    from zero2all.evals.bench import BenchOptions, Form, find_tasks, format_report, run_bench
    from zero2all.evals.target import find_target

    named: Sequence[PluginSpec] = tasks or []
    with suppress(Z2aError):  # said when the model is opened
        if not named and (run := find_target(target, step).run) is not None:
            named = run.recipe.evals.benchmarks
    if not named and not find_tasks(data):  # before the model is loaded
        raise UsageError(f"{data} has no files of a known benchmark: give their directory with --data")
    forms = [one for one in get_args(Form) if one in (form or ())]
    if unknown := set(form or ()) - set(forms):
        raise UsageError(f"--form {unknown.pop()}: one of {', '.join(get_args(Form))}")
    options = BenchOptions(tuple(forms), shots, limit, mutate, train_on_questions, contamination, unsafe_code)
    targets = [open_target(target, step), *([open_target(against)] if against is not None else [])]
    report = run_bench(targets, data, named, options)
    return Result(report, format_report(report))


@app.command("watch")
@command
def eval_watch(
    run: RunPath,
    tasks: Tasks = None,
    suite: Suites = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", help="The directory with the files of benchmarks. Default: no benchmarks.", metavar="DIR"
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of items of a benchmark.")] = 200,
    once: Annotated[bool, typer.Option("--once", help="Evaluate the checkpoints that are there, and end.")] = False,
    json: Json = False,
) -> Result:
    """Evaluate each new checkpoint of a run beside training.

    Runs until the run ends, on any machine that sees its directory. Values are added to evals.jsonl, and 'z2a watch'
    shows them. Keep checkpoints long enough for it: checkpoint.keep_latest.

    Example: z2a eval watch runs/first arc_easy --data eval
    """
    from zero2all.evals.probe_suite import load_suite
    from zero2all.evals.probes import default_suites
    from zero2all.evals.watch import WatchOptions, watch_run
    from zero2all.train import Run

    suites = [load_suite(name) for name in suite or default_suites(Run.open(run))]
    report = watch_run(str(run), WatchOptions(tuple(suites), data, tuple(tasks or ()), limit), once=once)
    lines = [f"{len(report.evaluated)} checkpoints evaluated", *map(str, report.verdicts)]
    return Result(report, "\n".join(lines))


@app.command("report")
@command
def eval_report(
    runs: Annotated[list[str], typer.Argument(help="Run directories.", metavar="RUN...")], json: Json = False
) -> Result:
    """Compare the evaluated checkpoints of runs, as Markdown.

    The values are those that 'z2a eval watch' and 'z2a eval probes' have recorded. 'z2a watch' plots them.

    Example: z2a eval report runs/first runs/deeper > evals.md
    """
    from zero2all.track.eval_report import read_evals, report_markdown
    from zero2all.train import Run

    opened = [(name, Run.open(Path(name))) for name in runs]
    found = [read_evals(name, run.directory, run.tokenizer().vocab_size) for name, run in opened]
    return Result({"runs": found}, report_markdown(found))


@app.command("lm-eval")
@command
def eval_lm_eval(
    target: Target,
    tasks: Annotated[list[str], typer.Argument(help="Names of lm-eval tasks.", metavar="TASK...")],
    include_path: Annotated[
        Path | None,
        typer.Option(
            "--include-path",
            help="A directory with YAML files of further tasks. Default: only lm-eval's own.",
            metavar="DIR",
        ),
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option("--num-fewshot", min=0, help="Number of examples in a prompt. Default: the task's.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Maximum number of items of each task, to save time. Default: all."),
    ] = None,
    step: CheckpointStep = None,
    json: Json = False,
) -> Result:
    """Run tasks of lm-eval on a checkpoint, without conversion.

    Needs lm-eval: pip install 'zero2all[lm-eval]'. Tasks that lm-eval downloads need a network; --include-path adds
    tasks on local files.

    Example: z2a eval lm-eval runs/first arc_easy --limit 200
    """
    from zero2all.base.errors import need

    need("lm_eval", "lm-eval")
    from zero2all.evals.lm_eval_model import run_lm_eval
    from zero2all.evals.target import open_target

    metrics = run_lm_eval(open_target(target, step), tasks, include_path, num_fewshot, limit)
    lines = [
        f"{one.task}  {one.metric} {one.value:.4f}"
        + ("" if one.stderr is None else f" ± {one.stderr:.4f}")
        + f"  ({one.items} items)"
        for one in metrics
    ]
    return Result({"metrics": metrics}, "\n".join(lines))


@app.command("stories")
@command
def eval_stories(
    run: RunPath,
    count: Annotated[int, typer.Option("--count", min=1, help="Number of stories to generate.")] = 200,
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
    evaluation = evaluate_stories(opened.load_model(step), opened.tokenizer(), count)
    return Result(evaluation, story_quality_line(evaluation.quality))
