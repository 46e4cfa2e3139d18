"""\"Is my loss normal?\" in words. Each rule looks for one thing, names itself, and says what it saw.

>>> for verdict in judge(run):
...     print(verdict.level, verdict.rule, verdict.text)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from zero2all.recipe import builtin
from zero2all.track.stream import Array
from zero2all.track.watched import WatchedRun
from zero2all.units import show_count, show_seconds

POINTS = 4000
FEWEST = 50  # points that a rule about a course needs
WINDOW = 50
SHOWN = 5  # damaged files
Level = Literal["good", "note", "bad"]


@dataclass(frozen=True)
class Verdict:
    """``text`` in English, ``text_zh`` the same in Chinese; ``step`` is where to look, if anywhere."""

    rule: str
    level: Level
    text: str
    text_zh: str
    step: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Course:
    """The loss of a run, in at most a few thousand points; ``high`` holds the worst step of each."""

    run: WatchedRun
    steps: Array
    loss: Array
    high: Array
    reference: Path | None


def judge(run: WatchedRun, references: Path | None = None) -> list[Verdict]:
    """Every rule that has something to say. ``references`` holds curves by the name of the recipe."""
    table = run.table(["loss"], points=POINTS)
    loss = table.mean["loss"]
    there = np.isfinite(loss)
    high = (table.high or table.mean)["loss"]
    named = re.fullmatch(r"[A-Za-z0-9_-]+", run.facts.name)  # a name that is a path is none of ours
    reference = (references or builtin("reference")) / f"{run.facts.name}.json" if named else None
    course = Course(run, table.steps[there], loss[there], high[there], reference)
    return [verdict for rule in RULES for verdict in rule(course)]


def initial_loss(course: Course) -> Iterator[Verdict]:
    """The first loss of an untrained model is close to ln V: it finds every token as likely as any other."""
    vocabulary = course.run.facts.vocab_size
    if not vocabulary or not len(course.steps) or course.steps[0] > 1:
        return
    first, expected = float(course.loss[0]), math.log(vocabulary)
    seen = f"{first:.2f}, ln {vocabulary} = {expected:.2f}"
    if first > expected + 1.5:
        yield Verdict(
            "initial loss", "bad", f"starts far above ln V ({seen}): the initial weights are too large, or targets "
            "are shifted", f"初始损失远高于 ln V（{seen}）：初始权重过大，或目标错位", 0)  # fmt: skip
    elif first < expected - 1.5:
        yield Verdict(
            "initial loss", "note",
            f"starts far below ln V ({seen}): it begins from trained weights, or sees its targets",
            f"初始损失远低于 ln V（{seen}）：从已训练的权重开始，或模型看到了目标", 0)  # fmt: skip
    else:
        yield Verdict(
            "initial loss", "good", f"starts where an untrained model should ({seen})",
            f"初始损失正常（{seen}）", 0)  # fmt: skip


def against_reference(course: Course) -> Iterator[Verdict]:
    """Loss after the same tokens in the curve recorded for this recipe and these sources: within 5 % is as expected."""
    batch = course.run.facts.batch_tokens
    if course.reference is None or not course.reference.exists() or not batch or not len(course.steps):
        return
    known = json.loads(course.reference.read_text(encoding="utf-8"))
    if known["sources"] != list(course.run.facts.sources):
        return
    tokens = (course.steps[-1] + 1) * batch
    if not known["tokens"][0] <= tokens <= known["tokens"][-1] * 1.02:
        return
    expected = float(np.interp(tokens, known["tokens"], known["loss"]))
    latest = float(np.median(course.loss[-max(5, len(course.loss) // 50) :]))
    share = latest / expected - 1
    seen = f"{latest:.3f} after {show_count(tokens)} tokens, reference {expected:.3f}"
    seen_zh = f"{show_count(tokens)} 个 token 后为 {latest:.3f}，参考曲线 {expected:.3f}"
    if share > 0.05:
        yield Verdict("reference", "bad", f"{100 * share:.0f} % above the reference curve ({seen})",
                      f"比参考曲线高 {100 * share:.0f} %（{seen_zh}）")  # fmt: skip
    else:
        where = "on" if share > -0.05 else f"{-100 * share:.0f} % below"
        where_zh = "与参考曲线一致" if share > -0.05 else f"比参考曲线低 {-100 * share:.0f} %"
        yield Verdict("reference", "good", f"{where} the reference curve ({seen})", f"{where_zh}（{seen_zh}）")


def not_finite(course: Course) -> Iterator[Verdict]:
    """The loop stopped at a loss or gradient that is not a number."""
    for event in course.run.events:
        if event["event"] == "not finite":
            yield Verdict("not finite", "bad", f"the loss or gradient was not finite at step {event.get('step')}",
                          f"第 {event.get('step')} 步损失或梯度不是有限数", event.get("step"))  # fmt: skip


def divergence(course: Course) -> Iterator[Verdict]:
    """The loss of the last twentieth lies more than 10 % above the lowest stretch before it."""
    if len(course.loss) < FEWEST:
        return
    smooth = _smooth(course.loss, max(5, len(course.loss) // 20))
    best = int(np.argmin(smooth))
    if smooth[-1] > 1.1 * smooth[best] and best < len(smooth) * 0.9:
        step = int(course.steps[best])
        yield Verdict(
            "divergence", "bad", f"rises: {smooth[best]:.3f} around step {step}, {smooth[-1]:.3f} now; "
            "try a lower learning rate, or go back to a checkpoint before it",
            f"损失回升：第 {step} 步附近 {smooth[best]:.3f}，现在 {smooth[-1]:.3f}；请降低学习率，或回到之前的检查点",
            step,
        )  # fmt: skip


def plateau(course: Course) -> Iterator[Verdict]:
    """The last fifth of the steps improved the median loss by less than 0.2 %."""
    if len(course.loss) < 4 * FEWEST:
        return
    fifth = len(course.loss) // 5
    before = float(np.median(course.loss[-2 * fifth : -fifth]))
    now = float(np.median(course.loss[-fifth:]))
    if 0.998 * before < now < 1.05 * before:
        step = int(course.steps[-fifth])
        yield Verdict("plateau", "note", f"hardly moves since step {step}: {before:.3f} before, {now:.3f} since",
                      f"第 {step} 步以来几乎不变：之前 {before:.3f}，之后 {now:.3f}", step)  # fmt: skip


def spikes(course: Course) -> Iterator[Verdict]:
    """A step lies above the median of the 50 before it by 6 times their usual distance and 0.3, and it is over soon."""
    if len(course.loss) < WINDOW + 6:
        return
    middle, usual = _before(course.loss)
    limit = middle + np.maximum(0.3, 6 * usual)
    after = np.array([np.median(course.loss[n + 1 : n + 6]) for n in range(WINDOW, len(course.loss) - 1)])
    above = (course.high[WINDOW:-1] > limit[:-1]) & (after < limit[:-1])
    if above.any():
        worst = int(np.argmax(np.where(above, course.high[WINDOW:-1] - middle[:-1], 0)))
        step, height, count = int(course.steps[WINDOW + worst]), course.high[WINDOW + worst], int(above.sum())
        yield Verdict(
            "spike", "note",
            f"{count} step(s) far above their neighbours, the worst {height:.3f} at step {step}; "
            f"'z2a blame RUN --step {step}' shows its documents",
            f"{count} 步远高于邻近各步，最严重的是第 {step} 步 {height:.3f}；用 z2a blame RUN --step {step} 查看其文档",
            step,
        )  # fmt: skip


def sudden_drop(course: Course) -> Iterator[Verdict]:
    """The median of 20 points lies 8 % and 8 usual distances below that of the 50 before, past the first tenth."""
    if len(course.loss) < WINDOW + FEWEST:
        return
    middle, usual = _before(course.loss)
    after = np.median(sliding_window_view(course.loss[WINDOW:], 20), axis=-1)
    fall = middle[: len(after)] - after
    found = np.flatnonzero(fall > np.maximum(0.08 * middle[: len(after)], 8 * usual[: len(after)]))
    found = found[found + WINDOW >= len(course.loss) // 10]
    if len(found):
        number = int(found[0])
        step, high, low = int(course.steps[WINDOW + number]), middle[number], after[number]
        yield Verdict(
            "sudden drop", "bad",
            f"falls from {high:.3f} to {low:.3f} around step {step}: does the data repeat, or do the targets leak?",
            f"第 {step} 步附近由 {high:.3f} 突降到 {low:.3f}：数据是否重复，或目标是否泄漏？",
            step,
        )  # fmt: skip


def dead_channel(course: Course) -> Iterator[Verdict]:
    """A channel of the loss has had no value, or always the same one, over the last fifth of the steps."""
    names = [name for name in course.run.streams[0].names if name.startswith("loss/")]
    if not names or len(course.steps) < FEWEST:
        return
    table = course.run.table(names, points=POINTS)
    since = len(table.steps) - len(table.steps) // 5
    for name in names:
        late = table.mean[name][since:]
        late = late[np.isfinite(late)]
        if not len(late) or (len(late) > 5 and np.ptp(late) == 0):
            what, what_zh = ("no value", "没有值") if not len(late) else (f"always {late[0]:g}", f"恒为 {late[0]:g}")
            step = int(table.steps[since])
            yield Verdict("dead channel", "bad", f"{name}: {what} since step {step}",
                          f"{name}：第 {step} 步以来{what_zh}", step)  # fmt: skip


def throughput_sag(course: Course) -> Iterator[Verdict]:
    """The last tenth ran at less than 85 % of the median speed before it."""
    if "tokens_per_second" not in course.run.streams[0].names or len(course.steps) < FEWEST:
        return
    table = course.run.table(["tokens_per_second"], points=POINTS)
    speed = table.mean["tokens_per_second"]
    speed = speed[np.isfinite(speed)]
    tenth = max(5, len(speed) // 10)
    before, now = float(np.median(speed[:-tenth])), float(np.median(speed[-tenth:]))
    if now < 0.85 * before:
        step = int(table.steps[-tenth])
        yield Verdict(
            "throughput sag", "note",
            f"slower since step {step}: {show_count(now)} tokens/s, {show_count(before)} before",
            f"第 {step} 步以来变慢：每秒 {show_count(now)} 个 token，之前为 {show_count(before)}",
            step,
        )  # fmt: skip


def silence(course: Course) -> Iterator[Verdict]:
    """A run that has not ended has written nothing for 20 times its usual step, and for a minute at least."""
    silent, pace = course.run.silent_seconds, course.run.status()["step_seconds"]
    if silent is not None and pace is not None and silent > max(60.0, 20 * pace):
        long = show_seconds(silent)
        yield Verdict(
            "silence", "bad",
            f"nothing was written for {long}; a step takes {pace:.2g} s: killed, or hanging",
            f"已有 {long} 没有新记录，每步通常 {pace:.2g} 秒：进程被杀或卡住",
            course.run.last_step,
        )  # fmt: skip


def damaged_files(course: Course) -> Iterator[Verdict]:
    """Lines or files of the run that could not be used. A crash tears a line; more than a few have another cause."""
    for damage in course.run.damage[:SHOWN]:
        yield Verdict("damaged files", "note", damage, f"文件损坏，已跳过：{damage}")


RULES: tuple[Callable[[Course], Iterator[Verdict]], ...] = (
    initial_loss, against_reference, not_finite, divergence, plateau, spikes, sudden_drop, dead_channel,
    throughput_sag, silence, damaged_files,
)  # fmt: skip


def reference_curve(run: WatchedRun, points: int = 200) -> dict[str, Any]:
    """The course of a good run, to hold later ones of its recipe against: tokens and smoothed loss."""
    table = run.table(["loss"])
    there = np.isfinite(table.mean["loss"])  # lines of other figures have none
    steps, loss = table.steps[there], table.mean["loss"][there]
    smooth = _smooth(loss, max(5, len(steps) // 50))
    rows = np.unique(np.linspace(0, len(smooth) - 1, points).astype(int))
    batch = run.facts.batch_tokens or 1
    return {
        "recipe": run.facts.name,
        "sources": list(run.facts.sources),
        "tokens": [int((steps[row] + 1) * batch) for row in rows],
        "loss": [round(float(smooth[row]), 4) for row in rows],
    }


def _before(values: Array) -> tuple[Array, Array]:
    """For each point past the first 50: the median of the 50 before it, and their usual distance from that."""
    windows = sliding_window_view(values, WINDOW)[:-1]
    middle = np.median(windows, axis=-1)
    return middle, np.median(np.abs(windows - middle[:, None]), axis=-1)


def _smooth(values: Array, width: int) -> Array:
    """The median of the last ``width`` points at every point."""
    padded = np.pad(values, (width - 1, 0), mode="edge")
    smoothed: Array = np.median(sliding_window_view(padded, width), axis=-1)
    return smoothed
