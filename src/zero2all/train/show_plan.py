"""What is printed before the first step: model, device and kernels; stages, tokens, epochs, learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zero2all.base.charts.terminal import MARKED, column_lines
from zero2all.base.console import say, warn
from zero2all.base.errors import Z2aError
from zero2all.base.machine.devices import dtype_name
from zero2all.base.units import show_count
from zero2all.model import hf_incompatibility
from zero2all.model.cost.model_size import count_parameters
from zero2all.parallel import ParallelModel
from zero2all.parallel.mesh import BatchSplit, split_stage
from zero2all.recipe import ModelConfig
from zero2all.tokens.conversation_rows import ConversationRows
from zero2all.track.record_reader import RecordReader
from zero2all.track.run_locations import RECORD_FILE, LocalRunLocation
from zero2all.train.hyperparameters import (
    STEP_LAW,
    TOKENS_PER_PARAMETER,
    ChosenValue,
    lr_parameters,
    step_law_batch_tokens,
    step_law_lr,
)
from zero2all.train.plan import MAX_USEFUL_EPOCHS, Plan, StagePlan

WIDTH, HEIGHT = 60, 3
HISTORY_POINTS = 1000  # read from the record, for a plot of WIDTH columns


@dataclass(frozen=True)
class LRHistory:
    """Learning rates of the steps before ``stop``, as the record has them."""

    stop: int
    steps: NDArray[np.float64]
    rates: NDArray[np.float64]


def read_lr_history(run_directory: Path, stop: int) -> LRHistory | None:
    """None if no step was trained before ``stop``, or the record does not have it."""
    if not stop:
        return None
    try:
        reader = RecordReader(LocalRunLocation(run_directory), RECORD_FILE)
        reader.refresh(reader.location.file_sizes())
        table = reader.table(["lr"], last=stop - 1, points=HISTORY_POINTS)
    except Z2aError:  # it cannot be read: there is less to show, and nothing else depends on it
        return None
    known = np.isfinite(table.mean["lr"])
    return LRHistory(stop, table.steps[known], table.mean["lr"][known]) if known.any() else None


@dataclass(frozen=True)
class ScalingAdvice:
    """What published scaling laws would choose for a model and a number of tokens; nothing is enforced."""

    tokens: int
    lr: float
    """Peak learning rate of AdamW."""
    batch_tokens: int
    compute_optimal_tokens: int


def say_run(
    plan: Plan,
    model: ParallelModel,
    peak_lr: float,
    chosen: list[ChosenValue],
    peak_flops_source: str,
    history: LRHistory | None = None,
) -> None:
    """Model, device, parallelism and kernels, then the plan."""
    parameters, tokens = count_parameters(model.config).total, plan.tokens_before(plan.total_steps)
    say(
        f"{show_count(parameters)} parameters on {model.mesh.device.type} in {dtype_name(model.dtype)} "
        f"({model.mesh.dims}), {show_count(tokens)} tokens in {plan.total_steps} steps; "
        f"utilisation against {peak_flops_source}"
    )
    ops = ", ".join(f"{choice.op} {choice.form}" for choice in model.model.ops.choices)
    float8 = f", their projections in float8 ({model.float8})" if model.float8 is not None else ""
    say(f"ops: {ops}; blocks {'compiled' if model.is_compiled else 'not compiled'}{float8}")
    if (reason := hf_incompatibility(model.config)) is not None:
        warn(f"this model cannot be exported to a standard architecture: {reason}")
    for value in chosen:
        say(f"chosen: {value}")
    for stage in plan.stages:
        say(stage_line(stage))
        say(f"  {split_line(split_stage(stage.recipe, model.recipe, model.mesh.dims), stage.recipe.seq_len)}")
        for name, rows in stage.dataset.conversation_rows.items():
            say(f"  {conversations_line(name, rows)}")
    say_plan(plan, peak_lr, history)
    say(advice_line(scaling_advice(model.config, tokens)))


def say_plan(plan: Plan, peak_lr: float, history: LRHistory | None = None) -> None:
    epochs = plan.epochs_by_source()
    say(epochs_line(epochs))
    for warning in epoch_warnings(epochs):
        warn(warning)
    if plan.total_steps > 1:
        for line in lr_plot(plan, peak_lr, history):
            say(line)


def stage_line(stage: StagePlan) -> str:
    recipe, tokens = stage.recipe, stage.tokens_before(stage.end_step)
    ramp = ""
    if recipe.batch_ramp is not None:
        ramp = f", from {show_count(recipe.batch_ramp.start)} tokens over the first {stage.ramp_steps} steps"
    return (
        f"stage {stage.name}: {stage.steps} steps of {show_count(recipe.batch_tokens)} tokens "
        f"({stage.batch_size} samples of {recipe.seq_len}){ramp}, {show_count(tokens)} tokens in total"
    )


def split_line(split: BatchSplit, seq_len: int) -> str:
    """How the tokens of a step come about."""
    tokens = split.micro_batches * split.ranks * split.samples * seq_len
    padding = f", {split.padding} of these samples padding" if split.padding else ""
    micro_batches = f"{split.micro_batches} micro-batch{'es' if split.micro_batches > 1 else ''}"
    ranks, samples = ("s" if count > 1 else "" for count in (split.ranks, split.samples))
    return (
        f"{tokens:,} tokens per step = {micro_batches} x {split.ranks} data-parallel rank{ranks} x "
        f"{split.samples} sample{samples} x {seq_len:,} tokens{padding}"
    )


def conversations_line(source: str, rows: ConversationRows) -> str:
    """How the conversations of a source are read, and which are not."""
    reasons = {
        f"longer than train.seq_len ({rows.seq_len})": rows.left_out.too_long,
        "without an answer to learn": rows.left_out.without_answer,
    }
    left_out = "".join(f", {count:,} left out: {reason}" for reason, count in reasons.items() if count)
    examples = "pairs" if rows.per_example == 2 else "conversations"
    return (
        f"{source}: {rows.num_examples:,} {examples} in {len(rows):,} rows, {rows.fill:.0%} of them filled, "
        f"{rows.num_targets:,} targets{left_out}"
    )


def epochs_line(epochs: dict[str, float]) -> str:
    return "epochs of each source: " + ", ".join(f"{name} {count:.2f}" for name, count in epochs.items())


def epoch_warnings(epochs: dict[str, float]) -> list[str]:
    return [
        f"{name} is read for {count:.1f} epochs; past {MAX_USEFUL_EPOCHS}, repeated text teaches little"
        for name, count in epochs.items()
        if count > MAX_USEFUL_EPOCHS
    ]


def scaling_advice(config: ModelConfig, tokens: int) -> ScalingAdvice:
    return ScalingAdvice(
        tokens=tokens,
        lr=step_law_lr(lr_parameters(config), tokens),
        batch_tokens=round(step_law_batch_tokens(tokens)),
        compute_optimal_tokens=TOKENS_PER_PARAMETER * count_parameters(config).active,
    )


def advice_line(advice: ScalingAdvice) -> str:
    return (
        f"scaling laws for {show_count(advice.tokens)} tokens: AdamW lr {advice.lr:.1e}, batch of "
        f"{show_count(advice.batch_tokens)} tokens ({STEP_LAW}); compute-optimal: "
        f"{show_count(advice.compute_optimal_tokens)} tokens, {TOKENS_PER_PARAMETER} per parameter "
        "(https://arxiv.org/abs/2203.15556)"
    )


def lr_plot(plan: Plan, peak_lr: float, history: LRHistory | None = None) -> list[str]:
    """Learning rate over the run in block characters: as recorded before a resume, as planned after it."""
    columns = min(WIDTH, plan.total_steps)
    steps = [round(column * (plan.total_steps - 1) / max(1, columns - 1)) for column in range(columns)]
    rates = [peak_lr * plan.stage_of(step).lr_multiplier(step) for step in steps]
    trained = 0 if history is None else sum(step < history.stop for step in steps)
    if history is not None:
        rates[:trained] = np.interp(steps[:trained], history.steps, history.rates).tolist()
    top = max(peak_lr, *rates)
    rows = column_lines([rate / top for rate in rates], HEIGHT, marked=trained)
    labels = [f"lr {top:.1e}", *[""] * (HEIGHT - 1)]
    lines = [f"{label:10} │{row}".rstrip() for label, row in zip(labels, rows, strict=True)]
    legend = "" if history is None else f": {MARKED} trained, █ planned from step {history.stop}"
    return [*lines, f"{'':11}└ step 0 to {plan.total_steps}{legend}"]
