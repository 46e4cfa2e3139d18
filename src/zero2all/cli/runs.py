"""z2a train | goodput | export"""

from __future__ import annotations

import json as jsonlib
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from zero2all.cli.conventions import Json, Overrides, RecipePath, Result, RunPath, Verbose, command, resumable_command
from zero2all.errors import UsageError

if TYPE_CHECKING:
    from zero2all.recipe import ExtendMode, Recipe

ExportFormatChoice = Literal["hf", "gguf"]
ExportDtypeChoice = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
CheckpointStep = Annotated[
    int | None, typer.Option("--step", help="Use the checkpoint of this step. Default: the newest.")
]
TensorParallel = Annotated[
    int, typer.Option("--tp", min=1, help="Tensor parallelism: number of ranks, started with 'z2a launch'.")
]
PipelineParallel = Annotated[
    int, typer.Option("--pp", min=1, help="Pipeline parallelism: number of ranks, started with 'z2a launch'.")
]
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
        help="Name of a run beside the others of the recipe, on the same tokens. Sets name and run in the recipe.",
    ),
]


DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print batch, epochs, schedule, memory, FLOPs and time; train nothing.")
]
Gpus = Annotated[
    int | None,
    typer.Option("--gpus", min=1, help="Number of GPUs for --dry-run. Default: as few as the recipe allows."),
]
GpuName = Annotated[
    str | None, typer.Option("--gpu", help="With --dry-run, compute the time on this GPU instead of measuring here.")
]
Mfu = Annotated[float | None, typer.Option("--mfu", min=0.01, max=1.0, help="MFU for --gpu. Default: 0.4.")]


@resumable_command
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    name: NewRunName = None,
    extend: Extend = None,
    dry_run: DryRun = False,
    gpu: GpuName = None,
    gpus: Gpus = None,
    mfu: Mfu = None,
    verbose: Verbose = False,
    json: Json = False,
) -> Result:
    """Train or resume a run.

    With --dry-run, print everything known about the run without training it.

    Example: z2a train recipes/quickstart.yaml model.num_hidden_layers=6 --name deeper
    """
    from zero2all.recipe import load_recipe

    loaded = load_recipe(recipe, [*(overrides or []), *name_overrides(name)])  # a mistake in it need not wait for torch

    from zero2all.evals import evaluate_bpb
    from zero2all.experiments.planned_run import record_plan
    from zero2all.processes import process_start_time
    from zero2all.train import ScheduleChangedError, TrainerHooks, train

    if dry_run:
        return show_estimate(loaded, gpu, gpus, mfu, extend)
    if (gpu, gpus, mfu) != (None, None, None):
        raise UsageError("--gpu, --gpus and --mfu are for --dry-run; 'z2a launch' starts several ranks")
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


def show_estimate(
    recipe: Recipe, gpu: str | None, gpus: int | None, mfu: float | None, extend: ExtendMode | None
) -> Result:
    from zero2all.hardware import pick_gpu
    from zero2all.train.estimate import DEFAULT_MFU, estimate_run

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("--dry-run needs no ranks: use 'z2a train' alone, with --gpus")
    if mfu is not None and gpu is None:
        raise UsageError("--mfu needs --gpu: without a named GPU, the speed is measured on this machine")
    named = None if gpu is None else pick_gpu(gpu)
    estimate, text = estimate_run(recipe, gpus, named, mfu or DEFAULT_MFU, extend)
    return Result(estimate, text)


def name_overrides(name: str | None) -> list[str]:
    """``--name`` as overrides of the recipe; in quotes, since a name such as 2 is text too."""
    return [] if name is None else [f"{key}={jsonlib.dumps(name)}" for key in ("name", "run")]


@command
def goodput(run: RunPath, json: Json = False) -> Result:
    """Show how much of a run's time was productive training.

    Lost time is listed by cause, over all restarts.

    Example: z2a goodput runs/first
    """
    from zero2all.track.goodput import compute_run_goodput, format_goodput
    from zero2all.train import Run

    result = compute_run_goodput(Run.open(run).directory)
    return Result(result, format_goodput(result))


@command
def export(
    run: RunPath,
    to: Annotated[Path, typer.Option("--to", help="The directory to write to.")],
    step: CheckpointStep = None,
    format: Annotated[
        ExportFormatChoice,
        typer.Option("--format", help="Format: hf (a Hugging Face directory) or gguf (a file for llama.cpp)."),
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
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the adapters (model.lora), in PEFT's format.")
    ] = False,
    json: Json = False,
) -> Result:
    """Export a model: Hugging Face directory or GGUF file.

    The export uses a standard architecture: Llama, Qwen2, Qwen3, Qwen3-MoE or GLM-4-MoE. Adapters are merged into the
    weights.

    Example: z2a export runs/first --to runs/first/gguf --format gguf --dtype q8_0
    """
    from zero2all.export import export_adapter_of_run, export_run
    from zero2all.train import Run

    if adapter:
        if check or format == "gguf":
            raise UsageError("--adapter writes PEFT's format and is not compared: leave out --check and --format")
        base = export_adapter_of_run(Run.open(run), to, step, dtype or "f32")
        return Result({"out": str(to), "base": base}, f"adapters exported to {to}; their base model is {base}")
    result = export_run(Run.open(run), to, step, format, dtype, check)
    what = "log-probabilities" if result.engine == "llama.cpp" else "logits"
    checked = f"; {what} in {result.engine} differ by {result.max_difference:.1e}" if result.engine else ""
    return Result(result, f"exported to {result.out} ({result.architecture}, {result.dtype}){checked}")
