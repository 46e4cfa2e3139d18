"""z2a eval lm-eval"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Result, command
from zero2all.cli.eval_bench import Target
from zero2all.cli.runs import CheckpointStep


@command
def eval_lm_eval(
    target: Target,
    tasks: Annotated[list[str], typer.Argument(help="Names of lm-eval tasks.", metavar="TASK...")],
    include_path: Annotated[
        Path | None,
        typer.Option(
            "--include-path",
            help="A directory with YAML files of further tasks. Default: those of lm-eval.",
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
    from zero2all.errors import need

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
