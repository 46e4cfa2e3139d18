"""The estimate of a run, as records and as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zero2all.base.units import show_count, show_seconds
from zero2all.checkpoint import InitialWeights
from zero2all.model.cost.model_size import ParameterCounts
from zero2all.parallel.mesh import BatchSplit
from zero2all.planner.plan_text import memory_lines
from zero2all.planner.rank_plan import MemoryPlan
from zero2all.recipe import Recipe
from zero2all.train.hyperparameters import ChosenValue
from zero2all.train.initial_weights import initial_weights_line
from zero2all.train.plan import Plan, StagePlan
from zero2all.train.show_plan import LRHistory, ScalingAdvice, advice_line, epochs_line, lr_plot, split_line, stage_line

TokensState = Literal["built", "estimated", "unknown"]
UNKNOWN = "unknown until 'z2a tokens build RECIPE'"


@dataclass(frozen=True)
class StageEstimate:
    """One stage of training. None is what depends on tokens that are not built."""

    name: str
    length: str
    """The length in the recipe, such as ``1 epochs``."""
    seq_len: int
    batch_tokens: int
    """After any batch ramp."""
    batch: BatchSplit
    ramp_steps: int | None
    steps: int | None
    tokens: int | None
    epochs: dict[str, float] | None
    """Epochs of each source in this stage."""
    flops_per_token: int
    flops: float | None


@dataclass(frozen=True)
class TimeEstimate:
    """How long training takes, and how that is known."""

    basis: Literal["measured", "unknown"]
    device: str
    mfu: float | None
    tokens_per_second: float | None
    """Over all ranks, on average over the stages."""
    seconds: float | None
    """Time of all steps."""
    note: str


@dataclass(frozen=True)
class LearningRates:
    """Peak rates, and the schedule at some steps; None if the number of steps is unknown."""

    lr: float
    muon_lr: float | None
    schedule: dict[int, float] | None
    """Learning rate by step."""
    chosen: list[ChosenValue]


@dataclass(frozen=True)
class RunEstimate:
    """The result of ``estimate_run``."""

    run: str
    parameters: ParameterCounts
    world_size: int
    mesh: dict[str, int]
    compute_dtype: str
    token_counts: TokensState
    """Whether token counts are read from the store, estimated from documents, or unknown."""
    steps: int | None
    tokens: int | None
    trained_steps: int
    """Steps of the newest checkpoint of the run."""
    trained_tokens: int
    initial_weights: InitialWeights | None
    """What a run that has no checkpoint yet begins with; None for random weights."""
    stages: list[StageEstimate]
    epochs: dict[str, float] | None
    learning_rates: LearningRates
    advice: ScalingAdvice | None
    flops: float | None
    warnings: list[str]
    memory_per_rank: MemoryPlan | None
    """On this machine, as is ``time``: None if a GPU was named, for which the plan has both."""
    time: TimeEstimate | None


@dataclass(frozen=True)
class EstimatedRun:
    recipe: Recipe
    """With every value that the recipe leaves open."""
    estimate: RunEstimate
    lines: list[str]
    """The same for a person, without memory and time."""

    @property
    def text(self) -> str:
        """With memory and time on this machine."""
        estimate = self.estimate
        assert estimate.memory_per_rank is not None
        assert estimate.time is not None
        memory = memory_lines(estimate.memory_per_rank, None, estimate.mesh["pp"])
        return "\n".join([_head_line(estimate), *self.lines, *memory, _flops_line(estimate), _time_line(estimate)])


def _head_line(estimate: RunEstimate) -> str:
    parameters, mesh = estimate.parameters, [f"{name} {size}" for name, size in estimate.mesh.items() if size > 1]
    active = f", {show_count(parameters.active)} active" if parameters.active != parameters.total else ""
    return f"{estimate.run}: {show_count(parameters.total)} parameters{active}, {estimate.compute_dtype}, " + (
        f"{estimate.world_size} ranks ({' x '.join(mesh)})" if mesh else "one process"
    )


def schedule_lines(estimate: RunEstimate, plan: Plan | None, history: LRHistory | None) -> list[str]:
    lines = [f"chosen: {value}" for value in estimate.learning_rates.chosen]
    if estimate.trained_steps:
        lines.append(f"the run has a checkpoint of step {estimate.trained_steps}; steps and time include these")
    if estimate.initial_weights is not None:
        lines.append(initial_weights_line(estimate.initial_weights))
    for number, stage in enumerate(estimate.stages):
        planned = None if plan is None else plan.stages[number]
        lines += _stage_lines(stage, planned, only=len(estimate.stages) == 1)
    if estimate.epochs is None:
        lines.append(f"epochs of each source: {UNKNOWN}")
    else:
        how = " (estimated from the size of the documents)" if estimate.token_counts == "estimated" else ""
        lines.append(epochs_line(estimate.epochs) + how)
    if plan is not None and plan.total_steps > 1:
        lines += lr_plot(plan, estimate.learning_rates.lr, history)
    if estimate.advice is not None:
        lines.append(advice_line(estimate.advice))
    return lines + [f"warning: {warning}" for warning in estimate.warnings]


def _stage_lines(stage: StageEstimate, planned: StagePlan | None, *, only: bool) -> list[str]:
    head = f"stage {stage.name}: {stage.length}, number of steps {UNKNOWN}"
    lines = [head if planned is None else stage_line(planned), f"  {split_line(stage.batch, stage.seq_len)}"]
    if not only:
        lines += [f"  {epochs_line(stage.epochs)}"] if stage.epochs is not None else []
        lines.append(f"  {show_count(stage.flops_per_token)} FLOPs per token" + _total_flops(stage.flops))
    return lines


def _flops_line(estimate: RunEstimate) -> str:
    per_token = " / ".join(dict.fromkeys(show_count(stage.flops_per_token) for stage in estimate.stages))
    return f"FLOPs: {per_token} per token" + _total_flops(estimate.flops)


def _total_flops(flops: float | None) -> str:
    return f", {flops:.2e} in total" if flops is not None else f", in total {UNKNOWN}"


def _time_line(estimate: RunEstimate) -> str:
    known = estimate.time
    assert known is not None
    if known.basis == "unknown":
        return f"time: {known.note}"
    total = f"time: {UNKNOWN}" if known.seconds is None else f"time: {show_seconds(known.seconds)}"
    if known.seconds is not None and estimate.world_size > 1:
        total += f" ({known.seconds * estimate.world_size / 3600:,.1f} device hours)"
    if known.seconds and estimate.trained_tokens and estimate.tokens:
        total += f", {show_seconds(known.seconds * (1 - estimate.trained_tokens / estimate.tokens))} of it left"
    speed = f" on {known.device}, {show_count(round(known.tokens_per_second or 0))} tok/s at an MFU of {known.mfu:.1%}"
    return f"{total}{speed} (measured: {known.note})"
