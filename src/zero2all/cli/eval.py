"""z2a eval loss | bench | stories | lm-eval"""

from __future__ import annotations

from typing import Annotated

import typer

from zero2all.cli import eval_bench, eval_lm_eval
from zero2all.cli.conventions import Json, Result, RunPath, command
from zero2all.cli.groups import EvalGroup
from zero2all.cli.runs import CheckpointStep

app = typer.Typer(cls=EvalGroup, help="Evaluate trained models.", no_args_is_help=True)


@app.callback()
def eval_group() -> None:
    """Evaluate trained models."""


@app.command("loss")
@command
def eval_loss(run: RunPath, step: CheckpointStep = None, json: Json = False) -> Result:
    """Measure bits-per-byte on the validation set.

    Example: z2a eval loss runs/first
    """
    from zero2all.evals import evaluate_bpb
    from zero2all.train import Run

    opened = Run.open(run)
    validation = evaluate_bpb(opened.load_model(step), opened.tokenizer(), opened.recipe)
    lines = [f"bits-per-byte {validation['bits_per_byte']:.4f} (unigram {validation['unigram_bits_per_byte']:.4f})"]
    lines += [f"  {name}: {part['bits_per_byte']:.4f}" for name, part in validation["sources"].items()]
    return Result(validation, "\n".join(lines))


app.command("bench")(eval_bench.eval_bench)
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
