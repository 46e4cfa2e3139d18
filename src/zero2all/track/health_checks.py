"""Health checks on a training run: \"is my loss normal?\". Each rule checks one thing and reports what it found.

>>> for finding in check_health(run):
...     print(finding.level, finding.rule, finding.text)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from zero2all.cpu_use import NOTICEABLE_SHARE
from zero2all.io import read_record
from zero2all.recipe import builtin_recipe_path
from zero2all.track.loss_changes import (
    CHANGE_ERRORS,
    DROP_ERRORS,
    SMOOTH,
    SourceCurve,
    fall_below_trend,
    is_certain,
    median_error,
    rise_since_best,
    source_curves,
    trailing_median,
)
from zero2all.track.record_reader import Array
from zero2all.track.run_view import RunView
from zero2all.units import show_count, show_seconds

MAX_POINTS = 4000
MIN_POINTS = 50  # that a rule about a curve needs
WINDOW = 50
GAP_CHANCE = 1e-8  # of a gap in a source that is alive
MAX_DAMAGED_FILES = 5  # reported per run
OTHER_CPU = "system/other_cpu"
Level = Literal["good", "note", "bad"]


@dataclass(frozen=True)
class HealthFinding:
    """``text`` in English, ``text_zh`` the same in Chinese; ``step`` is the step it points at, if any."""

    rule: str
    level: Level
    text: str
    text_zh: str
    step: int | None = None


@dataclass(frozen=True)
class ReferenceCurve:
    """The smoothed loss of a good run, to compare later runs of its recipe to."""

    recipe: str
    sources: list[str]
    tokens: list[int]
    loss: list[float]


@dataclass(frozen=True)
class LossCurve:
    """The loss of a run, downsampled to at most a few thousand points; ``high`` is the maximum of each."""

    run: RunView
    steps: Array
    loss: Array
    high: Array
    sources: list[SourceCurve]
    """Each is compared with itself: in a small batch the loss follows the share of each source."""
    reference: Path | None


def check_health(run: RunView, references: Path | None = None) -> list[HealthFinding]:
    """The findings of every rule. ``references`` is a directory of reference curves, by recipe name."""
    table = run.table(["loss"], points=MAX_POINTS)
    loss = table.mean["loss"]
    valid = np.isfinite(loss)
    high = (table.high or table.mean)["loss"]
    is_plain_name = re.fullmatch(r"[A-Za-z0-9_-]+", run.metadata.name)  # a name must not be a path
    reference = (
        (references or builtin_recipe_path("reference")) / f"{run.metadata.name}.json" if is_plain_name else None
    )
    sources = source_curves(run, table, MAX_POINTS)
    curve = LossCurve(run, table.steps[valid], loss[valid], high[valid], sources, reference)
    # The loss of other objectives is no cross-entropy: it has another start, may be 0, and falls differently.
    is_cross_entropy = run.metadata.objective.name in ("pretrain", "sft", "distill")
    rules = [rule for rule in RULES if is_cross_entropy or rule not in CROSS_ENTROPY_RULES]
    return [finding for rule in rules for finding in rule(curve)]


def initial_loss(curve: LossCurve) -> Iterator[HealthFinding]:
    """The first loss of an untrained model is close to ln V: it predicts a uniform distribution."""
    vocab_size = curve.run.metadata.vocab_size
    if not vocab_size or not len(curve.steps) or curve.steps[0] > 1:
        return
    first, expected = float(curve.loss[0]), math.log(vocab_size)
    details = f"{first:.2f}, ln {vocab_size} = {expected:.2f}"
    if first > expected + 1.5:
        yield HealthFinding(
            "initial loss", "bad", f"starts far above ln V ({details}): the initial weights are too large, or targets "
            "are shifted", f"初始损失远高于 ln V（{details}）：初始权重过大，或目标错位", 0)  # fmt: skip
    elif first < expected - 1.5:
        yield HealthFinding(
            "initial loss", "note",
            f"starts far below ln V ({details}): it starts from trained weights, or the targets leak",
            f"初始损失远低于 ln V（{details}）：从已训练的权重开始，或模型看到了目标", 0)  # fmt: skip
    else:
        yield HealthFinding(
            "initial loss", "good", f"matches an untrained model ({details})",
            f"初始损失正常（{details}）", 0)  # fmt: skip


def compare_to_reference(curve: LossCurve) -> Iterator[HealthFinding]:
    """The loss against the reference curve of this recipe and sources at the same tokens: within 5 % is expected."""
    batch = curve.run.metadata.batch_tokens
    if curve.reference is None or not curve.reference.exists() or not batch or not len(curve.steps):
        return
    reference = read_record(ReferenceCurve, curve.reference)
    if reference.sources != list(curve.run.metadata.sources):
        return
    tokens = (curve.steps[-1] + 1) * batch
    if not reference.tokens[0] <= tokens <= reference.tokens[-1] * 1.02:
        return
    expected = float(np.interp(tokens, reference.tokens, reference.loss))
    recent = curve.loss[-max(3 * SMOOTH, len(curve.loss) // 50) :]
    latest = float(np.median(recent))
    deviation = latest / expected - 1
    has_noise = latest - expected < CHANGE_ERRORS * median_error(curve.loss, 1 / len(recent))
    details = f"{latest:.3f} after {show_count(tokens)} tokens, reference {expected:.3f}"
    details_zh = f"{show_count(tokens)} 个 token 后为 {latest:.3f}，参考曲线 {expected:.3f}"
    if deviation > 0.05 and not has_noise:
        yield HealthFinding("reference", "bad", f"{100 * deviation:.0f} % above the reference curve ({details})",
                      f"比参考曲线高 {100 * deviation:.0f} %（{details_zh}）")  # fmt: skip
    else:
        where = "on" if deviation > -0.05 else f"{-100 * deviation:.0f} % below"
        where_zh = "与参考曲线一致" if deviation > -0.05 else f"比参考曲线低 {-100 * deviation:.0f} %"
        yield HealthFinding(
            "reference", "good", f"{where} the reference curve ({details})", f"{where_zh}（{details_zh}）"
        )


def not_finite(curve: LossCurve) -> Iterator[HealthFinding]:
    """Training stopped at a NaN or infinite loss or gradient."""
    for event in curve.run.events:
        if event.event == "not finite":
            yield HealthFinding("not finite", "bad", f"the loss or gradient was not finite at step {event.step}",
                          f"第 {event.step} 步损失或梯度不是有限数", event.step)  # fmt: skip


def divergence(curve: LossCurve) -> Iterator[HealthFinding]:
    """The smoothed losses of all sources are above their earlier minima, by 10 % and by far more than their noise."""
    changes = [change for source in curve.sources if (change := rise_since_best(source)) is not None]
    mean = sum(change.share for change in changes) / max(1, len(changes))
    if mean < 0.1 or not is_certain(changes):
        return
    worst = max(changes, key=lambda change: change.share)
    yield HealthFinding(
        "divergence", "bad", f"{worst.prefix}rises: {worst.before:.3f} around step {worst.step}, {worst.now:.3f} now; "
        "try a lower learning rate, or roll back to an earlier checkpoint",
        f"{worst.prefix}损失回升：第 {worst.step} 步附近 {worst.before:.3f}，现在 {worst.now:.3f}；"
        "请降低学习率，或回到之前的检查点",
        worst.step,
    )  # fmt: skip


def plateau(curve: LossCurve) -> Iterator[HealthFinding]:
    """The last fifth of the steps improved the median loss by less than 0.2 %."""
    if len(curve.loss) < 4 * MIN_POINTS:
        return
    fifth = len(curve.loss) // 5
    before = float(np.median(curve.loss[-2 * fifth : -fifth]))
    now = float(np.median(curve.loss[-fifth:]))
    if 0.998 * before < now < 1.05 * before:
        step = int(curve.steps[-fifth])
        yield HealthFinding("plateau", "note", f"almost flat since step {step}: {before:.3f} before, {now:.3f} since",
                      f"第 {step} 步以来几乎不变：之前 {before:.3f}，之后 {now:.3f}", step)  # fmt: skip


def loss_spikes(curve: LossCurve) -> Iterator[HealthFinding]:
    """A step is above the median of the 50 before it by 6 MAD and by 0.3, and the loss recovers within a few steps."""
    if len(curve.loss) < WINDOW + 6:
        return
    baseline, mad = _trailing_median_and_mad(curve.loss)
    limit = baseline + np.maximum(0.3, 6 * mad)
    after = _median_of_next_five(curve.loss)[WINDOW:]
    above = (curve.high[WINDOW:-1] > limit[:-1]) & (after < limit[:-1])
    if above.any():
        worst = int(np.argmax(np.where(above, curve.high[WINDOW:-1] - baseline[:-1], 0)))
        step, height, count = int(curve.steps[WINDOW + worst]), curve.high[WINDOW + worst], int(above.sum())
        yield HealthFinding(
            "spike", "note",
            f"{count} step(s) far above their neighbours, the worst {height:.3f} at step {step}; "
            f"'z2a blame RUN --step {step}' shows its documents",
            f"{count} 步远高于邻近各步，最严重的是第 {step} 步 {height:.3f}；用 z2a blame RUN --step {step} 查看其文档",
            step,
        )  # fmt: skip


def _median_of_next_five(loss: Array) -> Array:
    """For every point but the last; near the end of fewer. All windows at once: one by one takes most of a check."""
    full = np.median(np.lib.stride_tricks.sliding_window_view(loss[1:], 5), axis=1)
    rest = [np.median(loss[n + 1 : n + 6]) for n in range(len(full), len(loss) - 1)]
    return np.concatenate([full, np.array(rest)])


def sudden_drop(curve: LossCurve) -> Iterator[HealthFinding]:
    """The loss of a source falls below its trend, by 8 % and by far more than its noise, after the first tenth."""
    first_step = (curve.run.total_steps or 0) / 10
    changes = [change for source in curve.sources if (change := fall_below_trend(source, first_step)) is not None]
    change = max(changes, key=lambda change: change.errors, default=None)
    if change is not None and change.is_large(0.08) and change.errors > DROP_ERRORS:
        step, where = change.step, f"{change.prefix}falls from {change.before:.3f} to {change.now:.3f}"
        yield HealthFinding(
            "sudden drop", "bad",
            f"{where} around step {step}: does the data repeat, or do the targets leak? "
            f"'z2a blame RUN --step {step} --lowest' shows the text that it knows",
            f"{change.prefix}第 {step} 步附近由 {change.before:.3f} 突降到 {change.now:.3f}："
            "数据是否重复，或目标是否泄漏？"
            f"用 z2a blame RUN --step {step} --lowest 查看模型已经熟悉的文本",
            step,
        )  # fmt: skip


def dead_source(curve: LossCurve) -> Iterator[HealthFinding]:
    """A source of the current stage has had no loss for longer than chance explains, or a constant one."""
    names = [name for name in curve.run.readers[0].names if name.startswith("loss/")]
    if not names or len(curve.steps) < MIN_POINTS:
        return
    stage = next((event for event in reversed(curve.run.events) if event.event == "stage"), None)
    left_out = () if stage is None else curve.run.metadata.sources_left_out.get(str(stage.details.get("name")), ())
    table = curve.run.table(names, points=MAX_POINTS)
    of_stage = table.steps >= (-math.inf if stage is None or stage.step is None else stage.step)
    for name in names:
        values, steps = table.mean[name][of_stage], table.steps[of_stage]
        present = np.flatnonzero(np.isfinite(values))
        if name.removeprefix("loss/") in left_out or len(present) < SMOOTH:
            continue
        gap = len(values) - 1 - int(present[-1])
        # How likely such a gap is for a source that is in as many steps as before.
        chance = (1 - len(present) / (int(present[-1]) + 1)) ** gap if gap else 1.0
        late = present[-max(SMOOTH, len(present) // 5) :]
        if chance < GAP_CHANCE and gap >= SMOOTH:
            what, what_zh, step = "no value", "没有值", int(steps[present[-1]]) + 1
        elif np.ptp(values[late]) == 0:
            constant = f"{values[late[0]]:g}"
            what, what_zh, step = f"constant at {constant}", f"恒为 {constant}", int(steps[late[0]])
        else:
            continue
        yield HealthFinding("dead source", "bad", f"{name}: {what} since step {step}",
                      f"{name}：第 {step} 步以来{what_zh}", step)  # fmt: skip


def throughput_drop(curve: LossCurve) -> Iterator[HealthFinding]:
    """The last tenth ran at less than 85 % of the median speed before it."""
    if "tokens_per_second" not in curve.run.readers[0].names or len(curve.steps) < MIN_POINTS:
        return
    table = curve.run.table(["tokens_per_second"], points=MAX_POINTS)
    speed = table.mean["tokens_per_second"]
    speed = speed[np.isfinite(speed)]
    tenth = max(5, len(speed) // 10)
    before, now = float(np.median(speed[:-tenth])), float(np.median(speed[-tenth:]))
    if now < 0.85 * before:
        step = int(table.steps[-tenth])
        yield HealthFinding(
            "throughput drop", "note",
            f"slower since step {step}: {show_count(now)} tokens/s, {show_count(before)} before",
            f"第 {step} 步以来变慢：每秒 {show_count(now)} 个 token，之前为 {show_count(before)}",
            step,
        )  # fmt: skip


def busy_machine(curve: LossCurve) -> Iterator[HealthFinding]:
    """On a CPU, other programs used a noticeable share of it, in the median."""
    names = curve.run.readers[0].names
    if OTHER_CPU not in names or any(name.startswith("gpu") for name in names):
        return
    shares = curve.run.table([OTHER_CPU], points=MAX_POINTS).mean[OTHER_CPU]
    shares = shares[np.isfinite(shares)]
    if len(shares) and (median := float(np.median(shares))) >= NOTICEABLE_SHARE:
        percent = f"{100 * median:.0f}"
        yield HealthFinding(
            "busy machine", "note",
            f"other programs used {percent} % of the CPU: tokens/s, MFU and the time left are those of a busy machine",
            f"其他程序占用了 {percent} % 的 CPU：每秒 token 数、MFU 和剩余时间都受其影响",
        )  # fmt: skip


def silence(curve: LossCurve) -> Iterator[HealthFinding]:
    """A run that has not ended has written nothing for 20 step times, a minute, and twice its longest pause so far."""
    silent, pace = curve.run.silent_seconds, curve.run.status().step_seconds
    pauses = np.diff(curve.run.readers[0].step_times()[1])  # validation and checkpoints
    if silent is not None and pace is not None and silent > max(60.0, 20 * pace, 2 * float(pauses.max(initial=0.0))):
        long = show_seconds(silent)
        yield HealthFinding(
            "silence", "bad",
            f"nothing written for {long}; a step takes {pace:.2g} s: killed, or hung",
            f"已有 {long} 没有新记录，每步通常 {pace:.2g} 秒：进程被杀或卡住",
            curve.run.last_step,
        )  # fmt: skip


def damaged_files(curve: LossCurve) -> Iterator[HealthFinding]:
    """Lines or files of the run that are invalid. A crash truncates one line; more than a few have another cause."""
    for damage in curve.run.damage[:MAX_DAMAGED_FILES]:
        yield HealthFinding("damaged files", "note", damage, f"文件损坏，已跳过：{damage}")


def first_preference_loss(curve: LossCurve) -> Iterator[HealthFinding]:
    """Model and reference are the same at the first step of preference optimization, so that its loss is known."""
    objective = curve.run.metadata.objective
    known = {"kto": (0.5, "1/2")} if objective.name == "kto" else {}
    if objective.name == "dpo" and not objective.has_sft_term:
        known = {"sigmoid": (math.log(2), "ln 2"), "robust": (math.log(2), "ln 2"), "hinge": (1.0, "1")}
    key = "kto" if objective.name == "kto" else objective.dpo_loss
    if key not in known or not len(curve.steps) or curve.steps[0] > 0:
        return
    (expected, named), first = known[key], float(curve.loss[0])
    if abs(first - expected) < PREFERENCE_TOLERANCE:
        yield HealthFinding(
            "first loss", "good", f"{first:.3f} is {named}: expected at the first step, as the model is the reference",
            f"{first:.3f} 就是 {named}：第一步模型与参考模型相同，本应如此", 0)  # fmt: skip
    else:
        yield HealthFinding(
            "first loss", "bad", f"{first:.3f} at the first step, not {named}: model and reference differ already",
            f"第一步为 {first:.3f}，而不是 {named}：模型与参考模型一开始就不一致", 0)  # fmt: skip


def chosen_falls(curve: LossCurve) -> Iterator[HealthFinding]:
    """The log-probabilities of chosen and rejected answers fall together."""
    names = ["logps/chosen", "logps/rejected"]
    if not set(names) <= set(curve.run.readers[0].names):
        return
    table = curve.run.table(names, points=MAX_POINTS)
    chosen, rejected = (table.mean[name][np.isfinite(table.mean[name])] for name in names)
    tenth = max(SMOOTH, len(chosen) // 10)
    if min(len(chosen), len(rejected)) < 2 * tenth:
        return
    falls = [float(np.median(one[:tenth]) - np.median(one[-tenth:])) for one in (chosen, rejected)]
    limit = max(0.05 * abs(float(np.median(chosen[:tenth]))), CHANGE_ERRORS * median_error(chosen, 2 / tenth))
    if falls[0] > limit and falls[1] > 0:
        has_term = curve.run.metadata.objective.has_sft_term
        remedy = "" if has_term else ": add the SFT term (train.objective.dpo.sft_weight)"
        remedy_zh = "" if has_term else "：请加上 SFT 项（train.objective.dpo.sft_weight）"
        yield HealthFinding(
            "chosen falls", "bad",
            f"log p(chosen) is falling together with log p(rejected) ({falls[0]:.1f}, {falls[1]:.1f} nats){remedy}",
            f"log p(chosen) 随 log p(rejected) 一起下降，分别下降 {falls[0]:.1f} 和 {falls[1]:.1f}{remedy_zh}",
        )  # fmt: skip


def rollouts(curve: LossCurve) -> Iterator[HealthFinding]:
    """Reinforcement learning: most answers are cut, most groups teach nothing, or sampler and trainer disagree."""
    limits: tuple[tuple[str, float, Level, str, str], ...] = (
        ("truncated_answers", 0.5, "bad", "of the answers are cut at max_answer_tokens, and not learned from",
         "的回答在 max_answer_tokens 处被截断，没有参与学习"),
        ("groups_without_spread", 0.8, "note", "of the prompts have answers with equal rewards, which teach nothing: "
         "choose prompts that are neither solved nor too hard",
         "的提示下所有回答得分相同，学不到东西：请换难度适中的提示"),
        ("sampler_gap", 0.05, "bad", "is the mean difference of log-probabilities between sampler and trainer",
         "是采样器与训练器对数概率的平均差：两者不一致"),
    )  # fmt: skip
    for name, limit, level, text, text_zh in limits:
        if name not in curve.run.readers[0].names:
            continue
        values = curve.run.table([name], points=MAX_POINTS).mean[name]
        values = values[np.isfinite(values)]
        late = float(np.median(values[-max(5, len(values) // 10) :])) if len(values) else 0.0
        if late > limit:
            shown = f"{late:.3f}" if name == "sampler_gap" else f"{100 * late:.0f} %"
            yield HealthFinding(name.replace("_", " "), level, f"{shown} {text}", f"{shown} {text_zh}")


PREFERENCE_TOLERANCE = 0.01
CROSS_ENTROPY_RULES = (initial_loss, divergence, plateau, loss_spikes, sudden_drop)
RULES: tuple[Callable[[LossCurve], Iterator[HealthFinding]], ...] = (
    initial_loss, compare_to_reference, not_finite, divergence, plateau, loss_spikes, sudden_drop, dead_source,
    throughput_drop, busy_machine, silence, damaged_files, first_preference_loss, chosen_falls, rollouts,
)  # fmt: skip


def reference_curve(run: RunView, points: int = 200) -> ReferenceCurve:
    table = run.table(["loss"])
    valid = np.isfinite(table.mean["loss"])  # lines of other metrics have none
    steps, loss = table.steps[valid], table.mean["loss"][valid]
    smooth = trailing_median(loss, max(5, len(steps) // 50))
    rows = np.unique(np.linspace(0, len(smooth) - 1, points).astype(int))
    batch = run.metadata.batch_tokens or 1
    return ReferenceCurve(
        recipe=run.metadata.name,
        sources=list(run.metadata.sources),
        tokens=[int((steps[row] + 1) * batch) for row in rows],
        loss=[round(float(smooth[row]), 4) for row in rows],
    )


def _trailing_median_and_mad(values: Array) -> tuple[Array, Array]:
    """For each point after the first 50: the median and the MAD of the 50 before it."""
    windows = sliding_window_view(values, WINDOW)[:-1]
    baseline = np.median(windows, axis=-1)
    return baseline, np.median(np.abs(windows - baseline[:, None]), axis=-1)
