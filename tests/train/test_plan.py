from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import tiny_recipe
from zero2all.base.errors import RecipeError, UsageError
from zero2all.recipe import ExtendMode, ScheduleRecipe
from zero2all.tokens import TokenStore
from zero2all.train.plan import LRSchedule, Plan, StageSchedule, cap_mixture_weights

STAGES = """[
  {name: warm, steps: 6, mixture: {en: 1, zh: 1}},
  {name: long, tokens: 2048, seq_len: 64, batch_tokens: 512, schedule: {shape: cosine, warmup: 0, min_lr_ratio: 0.5}},
  {name: anneal, steps: 4, schedule: {shape: linear, warmup: 0, min_lr_ratio: 0}},
]"""
SHAPES = ["cosine", "linear", "constant", "inverse-sqrt", "wsd"]


def plan_of(workspace: Path, *overrides: str) -> Plan:
    recipe = tiny_recipe(workspace, *overrides)
    return Plan(recipe, TokenStore(recipe.tokens_dir, "train"))


def staged(workspace: Path, stages: str = STAGES, *overrides: str) -> Plan:
    return plan_of(workspace, "train.steps=null", f"train.stages={stages}", *overrides)


def schedule(shape: str, steps: int = 101, warmup: int = 10, peak: float = 1.0, **more: float) -> LRSchedule:
    recipe = ScheduleRecipe(shape=shape, peak=peak, **more)  # type: ignore[arg-type]
    return LRSchedule.from_recipe(recipe, steps, warmup, previous_lr_multiplier=1.0)


def lr_multipliers(shape: str, **more: float) -> list[float]:
    return [schedule(shape, **more).lr_multiplier(step) for step in range(101)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_warms_up_and_never_rises_again(shape: str) -> None:
    multipliers = lr_multipliers(shape, peak=0.5)
    assert multipliers[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert multipliers[10] == pytest.approx(0.5)
    assert all(a >= b for a, b in pairwise(multipliers[10:]))


def test_shapes_have_their_closed_forms() -> None:
    assert [lr_multipliers("cosine")[step] for step in (55, 100)] == pytest.approx([0.55, 0.1])
    assert [lr_multipliers("linear")[step] for step in (55, 100)] == pytest.approx([0.55, 0.1])
    assert lr_multipliers("constant")[100] == 1.0
    assert lr_multipliers("inverse-sqrt")[40] == pytest.approx(math.sqrt(10 / 40))
    wsd = lr_multipliers("wsd", decay_ratio=0.2, min_lr_ratio=0.0)
    assert wsd[80] == pytest.approx(1.0)
    assert wsd[90] == pytest.approx(0.5)
    assert wsd[100] == pytest.approx(0.0)


def test_stages_follow_each_other(workspace: Path) -> None:
    plan = staged(workspace)
    assert [(stage.name, stage.first_step, stage.steps) for stage in plan.stages] == [
        ("warm", 0, 6), ("long", 6, 4), ("anneal", 10, 4),
    ]  # fmt: skip
    assert plan.total_steps == 14
    assert [plan.stage_of(step).name for step in (0, 5, 6, 9, 10, 13)] == 2 * ["warm"] + 2 * ["long"] + 2 * ["anneal"]
    assert plan.stage_of(7).recipe.seq_len == 64
    assert plan.stage_of(7).sample_range(7) == (8, 16)
    assert plan.stage_of(10).sample_range(10) == (0, 8)
    assert plan.tokens_before(14) == 6 * 256 + 2048 + 4 * 256
    assert plan.tokens_before(8) == 6 * 256 + 2 * 512


def test_the_learning_rate_continues_where_the_stage_before_ended(workspace: Path) -> None:
    plan = staged(workspace)
    warm, long, anneal = plan.stages
    assert warm.lr_multiplier(5) == pytest.approx(0.1)
    assert long.lr_multiplier(6) == pytest.approx(0.1)  # cosine from 0.1 up to its own end
    assert long.lr_multiplier(9) == pytest.approx(0.5)
    assert anneal.lr_multiplier(10) == pytest.approx(0.5)
    assert anneal.lr_multiplier(13) == 0.0


def test_each_stage_has_its_own_sample_order(workspace: Path) -> None:
    one, other = staged(workspace, "[{name: a, steps: 2}, {name: b, steps: 2}]").stages
    assert one.dataset.fingerprint != other.dataset.fingerprint


def test_a_batch_ramp_takes_every_sample_once(workspace: Path) -> None:
    plan = plan_of(workspace, "train.batch_ramp={start: 64, over: 5 steps}", "train.steps=9")
    (stage,) = plan.stages
    batches = [stage.sample_range(step) for step in range(9)]
    assert [stop - start for start, stop in batches] == [2, 3, 4, 5, 6, 8, 8, 8, 8]
    assert batches[0][0] == 0
    assert all(a[1] == b[0] for a, b in pairwise(batches))
    assert plan.tokens_before(9) == 52 * 32


@pytest.mark.parametrize(("tokens", "steps"), [(64, 1), (159, 1), (160, 2), (20 * 32, 5), (27 * 32, 5), (28 * 32, 6)])
def test_a_duration_in_tokens_counts_the_batch_ramp(tokens: int, steps: int, workspace: Path) -> None:
    ramp = "train.batch_ramp={start: 64, over: 5 steps}"
    assert plan_of(workspace, ramp, "train.steps=null", f"train.tokens={tokens}").total_steps == steps


def test_only_stages_that_began_must_not_change(workspace: Path) -> None:
    before = staged(workspace)
    after = staged(workspace, STAGES.replace("name: anneal, steps: 4", "name: anneal, steps: 9"))
    assert before.identity() == after.identity()
    other = staged(workspace, STAGES.replace("seq_len: 64", "seq_len: 32"))
    assert before.identity(before=6) == other.identity(before=6)
    assert before.identity(before=7) != other.identity(before=7)


def test_other_sources_share_what_a_capped_source_cannot_give() -> None:
    sequences = {"zh": 100, "en": 1000, "code": 50}
    weights = cap_mixture_weights({"zh": 1, "en": 1, "code": 2}, sequences, total_samples=600, max_epochs=2)
    assert weights["code"] == pytest.approx(100 / 600)
    assert weights["zh"] == pytest.approx(200 / 600)
    assert weights["en"] == pytest.approx(300 / 600)
    with pytest.raises(UsageError, match=r"max_epochs=0\.1 allows no more than zh 10"):
        cap_mixture_weights({"zh": 1}, sequences, total_samples=600, max_epochs=0.1)


def test_a_capped_run_stays_under_its_cap(workspace: Path) -> None:
    def epochs(*more: str) -> dict[str, float]:
        return plan_of(workspace, "train.steps=40", "train.mixture={zh: 8, en: 1, code: 1}", *more).epochs_by_source()

    assert epochs()["zh"] > 1.2
    assert epochs("train.max_epochs=1.2")["zh"] == pytest.approx(1.2, rel=0.01)


def test_a_stage_that_is_longer_than_the_context_is_refused(workspace: Path) -> None:
    with pytest.raises(RecipeError, match=r"longer than model\.max_position_embeddings"):
        tiny_recipe(workspace, "train.steps=null", "train.stages=[{name: a, steps: 1, seq_len: 128}]")


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
