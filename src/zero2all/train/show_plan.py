"""The plan of a run as a person reads it before the first step: stages, tokens, passes, learning rate."""

from __future__ import annotations

from zero2all.console import say, warn
from zero2all.model.anatomy import count_parameters
from zero2all.model.flops import flops_per_token
from zero2all.recipe import ModelConfig
from zero2all.train.plan import MANY_PASSES, Plan, StagePlan
from zero2all.units import show_count

WIDTH, HEIGHT = 60, 8
EIGHTHS = " ▁▂▃▄▅▆▇█"


def say_plan(plan: Plan, peak_lr: float) -> None:
    for stage in plan.stages:
        say(stage_line(stage))
    passes = plan.passes()
    say("passes over each source: " + ", ".join(f"{name} {count:.2f}" for name, count in passes.items()))
    for name, count in passes.items():
        if count > MANY_PASSES:
            warn(f"{name} is gone through {count:.1f} times; past {MANY_PASSES}, repeated text teaches little")
    if plan.total > 1:
        for line in rate_plot(plan, peak_lr):
            say(line)


def say_advice(plan: Plan, config: ModelConfig) -> None:
    """What published scaling laws would choose for so much compute; said, not imposed.

    Learning rate and batch of AdamW from https://arxiv.org/abs/2401.02954, tokens from https://arxiv.org/abs/2203.15556.
    """
    parameters, tokens = count_parameters(config), plan.tokens_before(plan.total)
    compute = sum(
        flops_per_token(config, stage.stage.seq_len).model * stage.tokens_before(stage.end) for stage in plan.stages
    )
    say(
        f"scaling laws for {compute:.1e} operations: lr {0.3118 * compute**-0.125:.1e}, batch of "
        f"{show_count(round(0.292 * compute**0.3271))} tokens; 20 tokens a parameter would be "
        f"{show_count(20 * parameters.active)} (here {show_count(tokens)})"
    )


def stage_line(stage: StagePlan) -> str:
    recipe, tokens = stage.stage, stage.tokens_before(stage.end)
    return (
        f"stage {stage.name}: {stage.steps} steps of {show_count(recipe.batch_tokens)} tokens "
        f"({stage.batch_samples} samples of {recipe.seq_len}), {show_count(tokens)} tokens in all"
    )


def rate_plot(plan: Plan, peak_lr: float) -> list[str]:
    """Learning rate over the run in block characters."""
    columns = min(WIDTH, plan.total)
    steps = [round(column * (plan.total - 1) / max(1, columns - 1)) for column in range(columns)]
    heights = [round(plan.at(step).share(step) * HEIGHT * 8) for step in steps]
    lines = []
    for row in reversed(range(HEIGHT)):
        bars = "".join(EIGHTHS[min(8, max(0, height - 8 * row))] for height in heights)
        label = f"{peak_lr * (row + 1) / HEIGHT:.1e}" if row in (HEIGHT - 1, HEIGHT // 2 - 1) else " " * 7
        lines.append(f"lr {label} │{bars}".rstrip())
    return [*lines, f"{'':11}└ step 0 to {plan.total}"]
