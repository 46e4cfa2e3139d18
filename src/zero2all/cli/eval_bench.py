"""z2a eval bench"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from zero2all.cli.conventions import Json, Result, command
from zero2all.cli.runs import CheckpointStep
from zero2all.errors import UsageError

Target = Annotated[
    str,
    typer.Argument(help="A run, a checkpoint of a run or a Hugging Face directory.", metavar="RUN|CHECKPOINT|HF_DIR"),
]
Tasks = Annotated[
    list[str] | None,
    typer.Argument(help="Names of benchmarks, such as arc_easy. Default: all in the directory.", metavar="[TASK]..."),
]
Forms = Annotated[
    list[str] | None,
    typer.Option(
        "--form",
        help="How multiple-choice questions are asked: score the text of each option (cloze), its letter (letter), or "
        "the letter after a chain of thought (cot). Repeat it to compare. Default: that of the task.",
        metavar="cloze|letter|cot",
    ),
]


@command
def eval_bench(
    target: Target,
    tasks: Tasks = None,
    data: Annotated[Path, typer.Option("--data", help="The directory with the files of the benchmarks.")] = Path(
        "eval"
    ),
    form: Forms = None,
    shots: Annotated[
        int | None, typer.Option("--shots", min=0, help="Number of examples in a prompt. Default: that of the task.")
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
    seed: Annotated[int, typer.Option(help="Seed of --limit and --mutate.")] = 0,
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

    if not find_tasks(data):  # before the model is loaded
        raise UsageError(f"{data} has no files of a known benchmark: give their directory with --data")
    forms = [one for one in get_args(Form) if one in (form or ())]
    if unknown := set(form or ()) - set(forms):
        raise UsageError(f"--form {unknown.pop()}: one of {', '.join(get_args(Form))}")
    options = BenchOptions(tuple(forms), shots, limit, seed, mutate, train_on_questions, contamination, unsafe_code)
    targets = [open_target(target, step), *([open_target(against)] if against is not None else [])]
    report = run_bench(targets, data, tasks or (), options)
    return Result(report, format_report(report))
