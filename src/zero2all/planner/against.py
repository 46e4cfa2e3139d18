"""``z2a plan --against RUN``: what was planned beside what a run measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import computed_field

from zero2all.errors import UsageError
from zero2all.planner.plan import Plan
from zero2all.planner.workload import largest_stage
from zero2all.recipe import Recipe, load_recipe
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunView

WARMUP_SHARE = 0.1  # of the steps, left out
IN_PARTS = "without tp and ep, whose waits a run counts as forward and backward"
PROCESS_PARTS = ("CUDA context", "communicators", "fragmentation margin")  # not in the statistics of the allocator


@dataclass(frozen=True)
class PlanCheck:
    """One value, planned and measured."""

    name: str
    unit: str
    planned: float
    measured: float
    note: str = ""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ratio(self) -> float:
        """Measured to planned."""
        return self.measured / self.planned if self.planned else float("nan")


def read_run(directory: Path, recipe: Recipe) -> RunView:
    """The measurements of a run of ``recipe``; refused if the run is of another model or batch."""
    stored = directory / "recipe.yaml"
    if stored.is_file() and _shape(load_recipe(stored, stored=True)) != _shape(recipe):
        raise UsageError(
            f"{directory} trained another model or batch than the plan is for: plan the run itself, with "
            f"'z2a plan {directory} --against {directory}'"
        )
    view = RunView(LocalRunLocation(directory))
    view.read_to_end()
    if view.last_step is None:
        raise UsageError(f"{directory} has no steps to compare with: give the directory of a run that has trained")
    return view


def _shape(recipe: Recipe) -> tuple[object, ...]:
    """What decides the time of a step."""
    stage = largest_stage(recipe)
    return recipe.model.model_dump(exclude={"preset", "ops", "vocab_size"}), stage.seq_len, stage.batch_tokens


def check_plan(plan: Plan, view: RunView) -> list[PlanCheck]:
    """Medians over the steps after warm-up; of memory the most of any rank."""
    step, speed = plan.step, plan.speed
    tensors = sum(part.bytes for part in plan.memory.parts if part.name not in PROCESS_PARTS)
    inside = sum(one.seconds for one in step.traffic if one.dimension in ("tp", "ep") and not one.overlaps)
    exposed = max(0.0, step.expected - step.compute - inside)
    checks = [
        _check(view, "step time", "s", "step_time", step.expected, f"{step.shortest:.3g} to {step.longest:.3g} s"),
        _check(view, "exposed communication", "s", "time/communication", exposed, IN_PARTS if inside else ""),
        _check(view, "optimizer", "s", "time/optimizer", _seconds_of(plan, "optimizer")),
        _check(view, "tokens per second", "tok/s", "tokens_per_second", speed.tokens_per_second),
        _check(view, "TFLOP/s of a device", "TFLOP/s", "tflops", speed.tflops),
    ]
    memory = [value for rank in view.readers if (value := _most(view, "memory", rank)) is not None]
    if memory:
        note = "of tensors; a CPU reports resident memory, with libraries"
        checks.append(PlanCheck("peak memory", "GB", tensors / 1e9, max(memory) / 1e9, note))
    return [check for check in checks if check is not None]


def check_text(checks: list[PlanCheck]) -> str:
    lines = ["planned against measured:"]
    for one in checks:
        ratio = f"{one.ratio:.2f}x" if one.planned else "–"
        shown = f"{one.planned:>10.4g}  {one.measured:>10.4g} {one.unit:<8}{ratio:>7}"
        lines.append(f"  {one.name:<24}{shown}  {one.note}".rstrip())
    return "\n".join(lines)


def _seconds_of(plan: Plan, name: str) -> float:
    return sum(part.seconds for part in plan.step.parts if part.name.startswith(name))


def _check(view: RunView, name: str, unit: str, metric: str, planned: float, note: str = "") -> PlanCheck | None:
    values = view.table([metric]).mean[metric]
    values = values[int(WARMUP_SHARE * len(values)) :]
    values = values[np.isfinite(values)]
    return PlanCheck(name, unit, planned, float(np.median(values)), note) if len(values) else None


def _most(view: RunView, metric: str, rank: int) -> float | None:
    values = view.table([metric], rank=rank).mean[metric]
    values = values[np.isfinite(values)]
    return float(values.max()) if len(values) else None
