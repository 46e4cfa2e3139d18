"""Schedules of stages that were extended: closed forms of the step, which change nothing before the extension."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.recipe import ExtendMode, ScheduleRecipe
from zero2all.train.plan import LRSchedule, StageSchedule

SHAPES = ["cosine", "linear", "constant", "inverse-sqrt", "wsd"]


def schedule(shape: str = "cosine", steps: int = 600, warmup: int = 20, peak: float = 1.0) -> LRSchedule:
    recipe = ScheduleRecipe(shape=shape, peak=peak)  # type: ignore[arg-type]
    return LRSchedule.from_recipe(recipe, steps, warmup, previous_lr_multiplier=1.0)


def test_constant_holds_the_last_learning_rate() -> None:
    first = schedule()
    longer = StageSchedule.of(first).extended(600, "constant", schedule(steps=1000))
    assert [longer.lr_multiplier(step) for step in range(600)] == [first.lr_multiplier(step) for step in range(600)]
    assert {longer.lr_multiplier(step) for step in range(599, 1000)} == {0.1}
    assert (longer.steps, longer.end_lr_multiplier) == (1000, 0.1)


def test_rewarm_rises_linearly_to_the_peak_and_decays_to_the_end() -> None:
    longer = StageSchedule.of(schedule()).extended(600, "rewarm", schedule(steps=1000))
    assert longer.lr_multiplier(600) == pytest.approx(0.1 + 0.9 / 20)
    assert longer.lr_multiplier(609) == pytest.approx(0.55)
    assert longer.lr_multiplier(619) == longer.lr_multiplier(620) == 1.0
    assert longer.lr_multiplier(620 + 379) == longer.end_lr_multiplier == pytest.approx(0.1)
    assert longer.lr_multiplier((620 + 999) // 2) == pytest.approx(0.55, abs=0.01)
    assert all(a >= b for a, b in pairwise(longer.lr_multiplier(step) for step in range(620, 1000)))


def test_as_planned_jumps_to_the_new_schedule() -> None:
    planned = schedule(steps=1000)
    longer = StageSchedule.of(schedule()).extended(300, "as-planned", planned)
    assert longer.lr_multiplier(299) == schedule().lr_multiplier(299) < planned.lr_multiplier(299)
    assert [longer.lr_multiplier(step) for step in range(300, 1000)] == [
        planned.lr_multiplier(step) for step in range(300, 1000)
    ]


def test_a_second_extension_keeps_the_first() -> None:
    once = StageSchedule.of(schedule()).extended(600, "rewarm", schedule(steps=1000))
    twice = once.extended(1000, "constant", schedule(steps=1500))
    assert [twice.lr_multiplier(step) for step in range(1000)] == [once.lr_multiplier(step) for step in range(1000)]
    assert twice.lr_multiplier(1499) == once.lr_multiplier(999)


@settings(max_examples=60)
@given(
    shapes=st.tuples(st.sampled_from(SHAPES), st.sampled_from(SHAPES)),
    lengths=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    warmups=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    peak=st.floats(0.05, 1.0),
    mode=st.sampled_from(get_args(ExtendMode)),
    data=st.data(),
)
def test_any_extension_is_continuous_where_it_says_so_and_bounded(
    shapes: tuple[str, str],
    lengths: tuple[int, int],
    warmups: tuple[int, int],
    peak: float,
    mode: ExtendMode,
    data: st.DataObject,
) -> None:
    base = StageSchedule.of(schedule(shapes[0], lengths[0], warmups[0], peak))
    step = data.draw(st.integers(1, lengths[0]))
    planned = schedule(shapes[1], step + lengths[1], warmups[1])
    longer = base.extended(step, mode, planned)
    assert all(longer.lr_multiplier(before) == base.lr_multiplier(before) for before in range(step))
    last, after = base.lr_multiplier(step - 1), [longer.lr_multiplier(one) for one in range(step, longer.steps)]
    if mode == "constant":
        assert set(after) == {last}
    elif mode == "as-planned":
        assert after == [planned.lr_multiplier(one) for one in range(step, planned.steps)]
    else:
        for count, rate in enumerate(after[: warmups[1]], 1):
            assert rate == pytest.approx(last + (1.0 - last) * count / warmups[1])
        assert all(a >= b for a, b in pairwise(after[warmups[1] :]))
        if shapes[1] in ("cosine", "linear", "wsd") and lengths[1] > warmups[1] + 1:
            assert after[-1] == pytest.approx(0.1)
