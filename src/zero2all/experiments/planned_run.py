"""What is planned of a run, for its report and for ``z2a plan --against RUN``."""

from __future__ import annotations

from pathlib import Path

import torch

from zero2all.base.console import warn
from zero2all.base.errors import UsageError
from zero2all.base.io import write_record
from zero2all.base.machine.devices import compute_dtype, dtype_name
from zero2all.planner.calibrated import machine_entry
from zero2all.planner.cluster import Cluster
from zero2all.planner.plan import CostPlan, plan_run
from zero2all.planner.workload import largest_stage
from zero2all.recipe import ModelConfig, Recipe, load_recipe
from zero2all.track.run_locations import PLAN_FILE
from zero2all.track.run_metadata import PlannedRun, PlannedValue
from zero2all.track.run_view import PlanCheck, RunView, compare_with_run, read_run_view
from zero2all.train.hyperparameters import with_hyperparameters
from zero2all.train.micro_batch import estimate_micro_batch
from zero2all.train.run import Run

IN_PARTS = "without tp and ep, whose waits a run counts as forward and backward"
PROCESS_PARTS = ("CUDA context", "communicators", "fragmentation margin")  # not in the statistics of the allocator


def read_run(directory: Path, recipe: Recipe) -> RunView:
    """The measurements of a run of ``recipe``; an error if the run is of another model or batch."""
    stored = directory / "recipe.yaml"
    if stored.is_file() and _shape(load_recipe(stored)) != _shape(recipe):
        raise UsageError(
            f"{directory} trained another model or batch than the plan is for: plan the run itself, with "
            f"'z2a plan {directory} --against {directory}'"
        )
    view = read_run_view(directory)
    if view.last_step is None:
        raise UsageError(f"{directory} has no steps to compare with: give the directory of a run that has trained")
    return view


def _shape(recipe: Recipe) -> tuple[object, ...]:
    """What decides the time of a step."""
    stage = largest_stage(recipe)
    return recipe.model.model_dump(exclude={"preset", "ops", "vocab_size"}), stage.seq_len, stage.batch_tokens


def planned_run(plan: CostPlan) -> PlannedRun:
    """What a run of this plan will measure."""
    step, speed = plan.step, plan.speed
    tensors = sum(part.bytes for part in plan.memory.parts if part.name not in PROCESS_PARTS)
    inside = sum(one.seconds for one in step.traffic if one.dimension in ("tp", "ep") and not one.overlaps)
    exposed = max(0.0, step.expected - step.compute - inside)
    span, memory_note = f"{step.shortest:.3g} to {step.longest:.3g} s", "of tensors; a CPU reports resident memory"
    values = [
        PlannedValue("step time", "s", "step_time", step.expected, span),
        PlannedValue("exposed communication", "s", "time/communication", exposed, IN_PARTS if inside else ""),
        PlannedValue("optimizer", "s", "time/optimizer", _seconds_of(plan, "optimizer")),
        PlannedValue("tokens per second", "tok/s", "tokens_per_second", speed.tokens_per_second),
        PlannedValue("TFLOP/s of a device", "TFLOP/s", "tflops", speed.tflops),
        PlannedValue("peak memory", "GB", "memory", tensors / 1e9, memory_note, scale=1e9, over="most"),
    ]
    return PlannedRun(plan.cluster.gpu.name, plan.cluster.gpus, values)


def check_plan(plan: CostPlan, view: RunView) -> list[PlanCheck]:
    return compare_with_run(planned_run(plan), view)


def record_plan(run: Run, config: ModelConfig, device: torch.device, ranks: int) -> None:
    """Write what is planned of a run into its directory, if the hardware is known. Called when it starts, when torch is
    loaded anyway: a report then only compares. Never fails, because a run does not need it."""
    try:
        entry = machine_entry(device)
        (run.directory / PLAN_FILE).unlink(missing_ok=True)  # of a start on other hardware
        if entry is None:
            return
        cluster = Cluster.of(entry, ranks)
        precision = dtype_name(compute_dtype(run.recipe.train.compute_precision, device))
        recipe = run.recipe.model_copy(update={"model": config})
        recipe = with_hyperparameters(recipe, estimate_micro_batch(recipe, ranks, entry.memory))
        train = recipe.train.model_copy(update={"precision": precision})
        write_record(
            run.directory / PLAN_FILE, planned_run(plan_run(recipe.model_copy(update={"train": train}), cluster))
        )
    except Exception as error:
        warn(f"the report of this run will have no plan: {error}")


def check_text(checks: list[PlanCheck]) -> str:
    lines = ["planned against measured:"]
    for one in checks:
        ratio = f"{one.ratio:.2f}x" if one.planned else "–"
        shown = f"{one.planned:>10.4g}  {one.measured:>10.4g} {one.unit:<8}{ratio:>7}"
        lines.append(f"  {one.name:<24}{shown}  {one.note}".rstrip())
    return "\n".join(lines)


def _seconds_of(plan: CostPlan, name: str) -> float:
    return sum(part.seconds for part in plan.step.parts if part.name.startswith(name))
