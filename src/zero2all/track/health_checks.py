"""Health checks on a training run: \"is my loss normal?\". Each rule checks one thing and reports what it found.

>>> for finding in check_health(run):
...     print(finding)
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from zero2all.base.findings import Finding, Level
from zero2all.base.io import read_record
from zero2all.base.machine.cpus import NOTICEABLE_SHARE
from zero2all.base.package_data import read_package_table
from zero2all.base.units import show_count, show_seconds
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
)
from zero2all.track.record_reader import Array
from zero2all.track.run_view import RunView

MESSAGES: dict[str, dict[str, str]] = read_package_table(__package__, "health_messages.toml")


def health_finding(key: str, step: int | None = None, **values: object) -> Finding:
    """``step`` is also a value of the texts."""
    values["step"] = step
    level, _, rule = key.partition(":")[0].partition(" ")
    why, remedy, chinese = (MESSAGES[key].get(text, "").format(**values) for text in ("en", "remedy", "zh"))
    return Finding(cast(Level, level), rule, why, remedy, step, chinese)


MAX_POINTS = 4000
MIN_POINTS = 50  # that a rule about a curve needs
WINDOW = 50
GAP_CHANCE = 1e-8  # of a gap in a source that is alive
MAX_DAMAGED_FILES = 5  # reported per run
OTHER_CPU = "system/other_cpu"


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
    """Curves, each compared with itself: in a small batch the loss follows the share of each source."""
    reference: Path | None


def check_health(run: RunView, references: Path | None = None) -> list[Finding]:
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


def initial_loss(curve: LossCurve) -> Iterator[Finding]:
    """The first loss of an untrained model is close to ln V: it predicts a uniform distribution."""
    vocab_size = curve.run.metadata.vocab_size
    if not vocab_size or not len(curve.steps) or curve.steps[0] > 1:
        return
    first, expected = float(curve.loss[0]), math.log(vocab_size)
    is_high, is_low = first > expected + 1.5, first < expected - 1.5
    level = "bad" if is_high else "note" if is_low else "good"
    yield health_finding(f"{level} initial loss", 0, details=f"{first:.2f}, ln {vocab_size} = {expected:.2f}")


def compare_to_reference(curve: LossCurve) -> Iterator[Finding]:
    """The loss against the reference curve of this recipe and sources at the same tokens: within 5% is expected."""
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
    is_above = deviation > 0.05 and not has_noise
    key = "bad reference" if is_above else "good reference" if deviation > -0.05 else "good reference: below"
    percent = 100 * abs(deviation)
    yield health_finding(key, percent=percent, loss=latest, tokens=show_count(tokens), expected=expected)


def not_finite(curve: LossCurve) -> Iterator[Finding]:
    """Training stopped at a NaN or infinite loss or gradient."""
    for event in curve.run.events:
        if event.event == "not finite":
            yield health_finding("bad not finite", event.step)


def divergence(curve: LossCurve) -> Iterator[Finding]:
    """The smoothed losses of all sources are above their earlier minima, by 10% and by far more than their noise."""
    changes = [change for source in curve.sources if (change := rise_since_best(source)) is not None]
    mean = sum(change.share for change in changes) / max(1, len(changes))
    if mean < 0.1 or not is_certain(changes):
        return
    worst = max(changes, key=lambda change: change.share)
    yield health_finding("bad divergence", worst.step, source=worst.prefix, before=worst.before, now=worst.now)


def plateau(curve: LossCurve) -> Iterator[Finding]:
    """The last fifth of the steps improved the median loss by less than 0.2%."""
    if len(curve.loss) < 4 * MIN_POINTS:
        return
    fifth = len(curve.loss) // 5
    before = float(np.median(curve.loss[-2 * fifth : -fifth]))
    now = float(np.median(curve.loss[-fifth:]))
    if 0.998 * before < now < 1.05 * before:
        yield health_finding("note plateau", int(curve.steps[-fifth]), before=before, now=now)


def loss_spikes(curve: LossCurve) -> Iterator[Finding]:
    """A step is above the median of the 50 before it by 6 MAD and by 0.3, and the loss recovers within a few steps."""
    if len(curve.loss) < WINDOW + 6:
        return
    baseline, mad = _trailing_median_and_mad(curve.loss)
    limit = baseline + np.maximum(0.3, 6 * mad)
    after = _median_of_next_five(curve.loss)[WINDOW:]
    above = (curve.high[WINDOW:-1] > limit[:-1]) & (after < limit[:-1])
    if above.any():
        worst = int(np.argmax(np.where(above, curve.high[WINDOW:-1] - baseline[:-1], 0)))
        step, height = int(curve.steps[WINDOW + worst]), curve.high[WINDOW + worst]
        yield health_finding("note spike", step, count=int(above.sum()), height=height)


def _median_of_next_five(loss: Array) -> Array:
    """Median of the five points after each point but the last; near the end, of fewer.

    All windows at once: one by one takes most of a check.
    """
    full = np.median(np.lib.stride_tricks.sliding_window_view(loss[1:], 5), axis=1)
    rest = [np.median(loss[n + 1 : n + 6]) for n in range(len(full), len(loss) - 1)]
    return np.concatenate([full, np.array(rest)])


def sudden_drop(curve: LossCurve) -> Iterator[Finding]:
    """The loss of a source falls below its trend, by 8% and by far more than its noise, after the first tenth."""
    first_step = (curve.run.total_steps or 0) / 10
    changes = [change for source in curve.sources if (change := fall_below_trend(source, first_step)) is not None]
    change = max(changes, key=lambda change: change.errors, default=None)
    if change is not None and change.is_large(0.08) and change.errors > DROP_ERRORS:
        yield health_finding("bad sudden drop", change.step, source=change.prefix, before=change.before, now=change.now)


def dead_source(curve: LossCurve) -> Iterator[Finding]:
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
            yield health_finding("bad dead source: missing", int(steps[present[-1]]) + 1, name=name)
        elif np.ptp(values[late]) == 0:
            yield health_finding("bad dead source: constant", int(steps[late[0]]), name=name, value=values[late[0]])


def throughput_drop(curve: LossCurve) -> Iterator[Finding]:
    """The last tenth ran at less than 85% of the median speed before it."""
    if "tokens_per_second" not in curve.run.readers[0].names or len(curve.steps) < MIN_POINTS:
        return
    table = curve.run.table(["tokens_per_second"], points=MAX_POINTS)
    speed = table.mean["tokens_per_second"]
    speed = speed[np.isfinite(speed)]
    tenth = max(5, len(speed) // 10)
    before, now = float(np.median(speed[:-tenth])), float(np.median(speed[-tenth:]))
    if now < 0.85 * before:
        yield health_finding(
            "note throughput drop", int(table.steps[-tenth]), now=show_count(now), before=show_count(before)
        )


def busy_machine(curve: LossCurve) -> Iterator[Finding]:
    """Other programs used a noticeable share of the CPU that trains, in the median."""
    names = curve.run.readers[0].names
    if OTHER_CPU not in names or any(name.startswith("gpu") for name in names):
        return
    shares = curve.run.finite_values(OTHER_CPU, MAX_POINTS)
    if len(shares) and (median := float(np.median(shares))) >= NOTICEABLE_SHARE:
        yield health_finding("note busy machine", percent=100 * median)


def silence(curve: LossCurve) -> Iterator[Finding]:
    """A run that has not ended has written nothing for 20 step times, a minute, and twice its longest pause so far."""
    run = curve.run
    last, pace = run.table([], first=(run.last_step or 0) - 1).times, run.status().step_seconds
    if not len(last) or pace is None or run.ended is not None:
        return
    silent = time.time() - float(last[-1])
    pauses = np.diff(run.readers[0].step_times()[1])  # validation and checkpoints
    if silent > max(60.0, 20 * pace, 2 * float(pauses.max(initial=0.0))):
        yield health_finding("bad silence", run.last_step, long=show_seconds(silent), pace=pace)


def damaged_files(curve: LossCurve) -> Iterator[Finding]:
    """Lines or files of the run that are invalid. A crash truncates one line; more than a few have another cause."""
    for damage in curve.run.damage[:MAX_DAMAGED_FILES]:
        yield health_finding("note damaged files", damage=damage)


def first_preference_loss(curve: LossCurve) -> Iterator[Finding]:
    """Model and reference are the same at the first step of preference optimization, so that its loss is known."""
    objective = curve.run.metadata.objective
    known = {"kto": (0.5, "1/2")} if objective.name == "kto" else {}
    if objective.name == "dpo" and not objective.has_sft_term:
        known = {"sigmoid": (math.log(2), "ln 2"), "robust": (math.log(2), "ln 2"), "hinge": (1.0, "1")}
    loss = "kto" if objective.name == "kto" else objective.dpo_loss
    if loss not in known or not len(curve.steps) or curve.steps[0] > 0:
        return
    (expected, named), first = known[loss], float(curve.loss[0])
    level = "good" if abs(first - expected) < PREFERENCE_TOLERANCE else "bad"
    yield health_finding(f"{level} first loss", 0, first=first, named=named)


def chosen_falls(curve: LossCurve) -> Iterator[Finding]:
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
        yield health_finding("bad chosen falls", chosen=falls[0], rejected=falls[1])


def rollouts(curve: LossCurve) -> Iterator[Finding]:
    """Reinforcement learning: most answers are cut, most groups teach nothing, or sampler and trainer disagree."""
    limits = {"bad truncated answers": 0.5, "note groups without spread": 0.8, "bad sampler gap": 0.05}
    for key, limit in limits.items():
        name = key.partition(" ")[2].replace(" ", "_")
        if name not in curve.run.readers[0].names:
            continue
        values = curve.run.finite_values(name, MAX_POINTS)
        late = float(np.median(values[-max(5, len(values) // 10) :])) if len(values) else 0.0
        if late > limit:
            yield health_finding(key, late=late)


PREFERENCE_TOLERANCE = 0.01
CROSS_ENTROPY_RULES = (initial_loss, divergence, plateau, loss_spikes, sudden_drop)
RULES: tuple[Callable[[LossCurve], Iterator[Finding]], ...] = (
    initial_loss, compare_to_reference, not_finite, divergence, plateau, loss_spikes, sudden_drop, dead_source,
    throughput_drop, busy_machine, silence, damaged_files, first_preference_loss, chosen_falls, rollouts,
)  # fmt: skip


def _trailing_median_and_mad(values: Array) -> tuple[Array, Array]:
    """Median and MAD of the 50 points before each point after the first 50."""
    windows = sliding_window_view(values, WINDOW)[:-1]
    baseline = np.median(windows, axis=-1)
    return baseline, np.median(np.abs(windows - baseline[:, None]), axis=-1)
