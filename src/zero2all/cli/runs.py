"""z2a quickstart | train | export"""

from __future__ import annotations

import json as jsonlib
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from zero2all.base.errors import UsageError
from zero2all.cli.conventions import (
    CheckpointStep,
    Json,
    Overrides,
    RecipePath,
    Result,
    RunPath,
    Verbose,
    command,
    resumable_command,
)

ExportFormatChoice = Literal["hf", "gguf", "adapter"]
ExportDtypeChoice = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
Extend = Annotated[
    Literal["constant", "rewarm", "as-planned"] | None,
    typer.Option(
        "--extend",
        help="Resume with a changed length, schedule, optimizer setting, guard, precision or sync, with this learning "
        "rate. Default: a change is an error.",
    ),
]


NewRunName = Annotated[
    str | None,
    typer.Option(
        "--name",
        help="Name of a run beside the others of the recipe, on the same tokens. "
        "Default: the keys name and run of the recipe.",
    ),
]


@resumable_command
def quickstart(
    out: Annotated[Path, typer.Option("--out", help="Output directory of all stages.")],
    corpus: Annotated[
        list[Path] | None,
        typer.Option(
            "--corpus",
            help="Text to train on: files or directories; several paths can follow. Default: generated stories.",
        ),
    ] = None,
    more: Annotated[
        list[str] | None, typer.Argument(help="More paths for --corpus, and recipe overrides such as train.steps=50.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Then fine-tune it on conversations, and check its answers.")
    ] = False,
    verbose: Verbose = False,
    json: Json = False,
) -> Result:
    """Train a small model end to end, in minutes on a CPU.

    Without --corpus it trains on short stories in English and Chinese that it writes itself. With --chat it becomes a
    model that answers, in the directory chat below --out: 'z2a chat' talks to it.

    Example: z2a quickstart --corpus books/ notes/ --out runs/first
    """
    from zero2all.quickstart import quickstart, summary_text

    overrides = [word for word in more or [] if "=" in word and not Path(word).exists()]
    paths = [*(corpus or []), *(Path(word) for word in more or [] if word not in overrides)]
    result = quickstart(out, paths, overrides, [] if chat else None)
    return Result(result.to_json(), summary_text(result))


@resumable_command
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    name: NewRunName = None,
    extend: Extend = None,
    verbose: Verbose = False,
    json: Json = False,
) -> Result:
    """Train or resume a run.

    'z2a plan RECIPE' prints what is known about the run before it trains.

    Example: z2a train recipes/quickstart.yaml model.num_hidden_layers=6 --name deeper
    """
    from zero2all.recipe import load_recipe

    loaded = load_recipe(recipe, [*(overrides or []), *name_overrides(name)])  # a mistake in it need not wait for torch

    from zero2all.base.processes import process_start_time
    from zero2all.evals import evaluate_bpb
    from zero2all.experiments.planned_run import record_plan
    from zero2all.train import ScheduleChangedError, TrainerHooks, train

    try:
        hooks = TrainerHooks(on_run=record_plan)
        summary = train(loaded, hooks, evaluate=evaluate_bpb, start_time=process_start_time(), extend=extend)
    except ScheduleChangedError as error:
        launched = "launch ... -- " if "RANK" in os.environ else ""
        with_choice = shlex.join([*sys.argv[1:], "--extend", error.suggestion])
        message = f"{error}\nfor example: z2a {launched}{with_choice}"
        raise ScheduleChangedError(message, error.suggestion) from error
    is_rank0 = os.environ.get("RANK", "0") == "0"  # only one of several ranks reports it
    text = f"trained {summary.steps} steps; the run is in {summary.run}" if is_rank0 else ""
    return Result(asdict(summary), text)


def name_overrides(name: str | None) -> list[str]:
    """``--name`` as overrides of the recipe; in quotes, since a name such as 2 is text too."""
    return [] if name is None else [f"{key}={jsonlib.dumps(name)}" for key in ("name", "run")]


@command
def export(
    run: RunPath,
    to: Annotated[Path, typer.Option("--to", help="The directory to write to.")],
    step: CheckpointStep = None,
    format: Annotated[
        ExportFormatChoice,
        typer.Option(
            "--format", help="Format: hf (a Hugging Face directory), gguf (a file for llama.cpp) or adapter (for PEFT)."
        ),
    ] = "hf",
    dtype: Annotated[
        ExportDtypeChoice | None,
        typer.Option(
            "--dtype", help="Type of the stored weights; q8_0 and q4_0 are for GGUF. Default: f32 (hf), f16 (gguf)."
        ),
    ] = None,
    check: Annotated[
        bool | None,
        typer.Option(
            "--check/--no-check",
            help="Load the export with transformers or llama.cpp and compare. Default: if it is installed.",
        ),
    ] = None,
    json: Json = False,
) -> Result:
    """Export a model: Hugging Face directory or GGUF file.

    The export uses a standard architecture: Llama, Qwen2, Qwen3, Qwen3-MoE or GLM-4-MoE. Adapters are merged into the
    weights.

    Example: z2a export runs/first --to runs/first/gguf --format gguf --dtype q8_0
    """
    from zero2all.export import export_adapter_of_run, export_run
    from zero2all.train import Run

    if format == "adapter":
        if check:
            raise UsageError("--format adapter is not compared: leave out --check")
        base = export_adapter_of_run(Run.open(run), to, step, dtype or "f32")
        return Result({"out": str(to), "base": base}, f"adapters exported to {to}; their base model is {base}")
    result = export_run(Run.open(run), to, step, format, dtype, check)
    what = "log-probabilities" if result.engine == "llama.cpp" else "logits"
    checked = f"; {what} in {result.engine} differ by {result.max_difference:.1e}" if result.engine else ""
    return Result(result, f"exported to {result.out} ({result.architecture}, {result.dtype}){checked}")
