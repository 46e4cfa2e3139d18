from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import tiny_recipe
from zero2all.errors import RecipeError, UsageError
from zero2all.recipe import ScheduleRecipe
from zero2all.tokens import TokenStore
from zero2all.train.plan import Plan, capped_weights
from zero2all.train.schedule import Schedule

STAGES = """[
  {name: warm, steps: 6, mixture: {en: 1, zh: 1}},
  {name: long, tokens: 2048, seq_len: 64, batch_tokens: 512, schedule: {shape: cosine, warmup: 0, final: 0.5}},
  {name: anneal, steps: 4, schedule: {shape: linear, warmup: 0, final: 0}},
]"""


def plan_of(world: Path, *overrides: str) -> Plan:
    recipe = tiny_recipe(world, *overrides)
    return Plan(recipe, TokenStore(recipe.tokens_dir, "train"))


def staged(world: Path, stages: str = STAGES, *overrides: str) -> Plan:
    return plan_of(world, "train.steps=null", f"train.stages={stages}", *overrides)


def shares(shape: str, steps: int = 101, warmup: int = 10, peak: float = 1.0, **more: float) -> list[float]:
    schedule = Schedule.of(ScheduleRecipe(shape=shape, peak=peak, **more), steps, warmup, previous=1.0)  # type: ignore[arg-type]
    return [schedule.share(step) for step in range(steps)]


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant", "inverse-sqrt", "wsd"])
def test_every_shape_warms_up_and_never_rises_again(shape: str) -> None:
    rates = shares(shape, peak=0.5)
    assert rates[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert rates[10] == pytest.approx(0.5)
    assert all(a >= b for a, b in pairwise(rates[10:]))


def test_shapes_have_their_closed_forms() -> None:
    assert [shares("cosine")[step] for step in (55, 100)] == pytest.approx([0.55, 0.1])
    assert [shares("linear")[step] for step in (55, 100)] == pytest.approx([0.55, 0.1])
    assert shares("constant")[100] == 1.0
    assert shares("inverse-sqrt")[40] == pytest.approx(math.sqrt(10 / 40))
    wsd = shares("wsd", decay=0.2, final=0.0)
    assert wsd[80] == pytest.approx(1.0)
    assert wsd[90] == pytest.approx(0.5)
    assert wsd[100] == pytest.approx(0.0)


def test_stages_follow_each_other(world: Path) -> None:
    plan = staged(world)
    assert [(stage.name, stage.first_step, stage.steps) for stage in plan.stages] == [
        ("warm", 0, 6), ("long", 6, 4), ("anneal", 10, 4),
    ]  # fmt: skip
    assert plan.total == 14
    assert [plan.at(step).name for step in (0, 5, 6, 9, 10, 13)] == ["warm", "warm", "long", "long", "anneal", "anneal"]
    assert plan.at(7).stage.seq_len == 64
    assert plan.at(7).batch(7) == (8, 16)
    assert plan.at(10).batch(10) == (0, 8)
    assert plan.tokens_before(14) == 6 * 256 + 2048 + 4 * 256
    assert plan.tokens_before(8) == 6 * 256 + 2 * 512


def test_the_rate_goes_on_where_the_stage_before_it_ended(world: Path) -> None:
    plan = staged(world)
    warm, long, anneal = plan.stages
    assert warm.share(5) == pytest.approx(0.1)
    assert long.share(6) == pytest.approx(0.1)  # cosine from 0.1 up to its own end
    assert long.share(9) == pytest.approx(0.5)
    assert anneal.share(10) == pytest.approx(0.5)
    assert anneal.share(13) == 0.0


def test_stages_draw_their_own_samples(world: Path) -> None:
    one, other = staged(world, "[{name: a, steps: 2}, {name: b, steps: 2}]").stages
    assert one.samples.fingerprint != other.samples.fingerprint


def test_a_batch_ramp_takes_every_sample_once(world: Path) -> None:
    plan = plan_of(world, "train.batch_ramp={start: 64, over: 5 steps}", "train.steps=9")
    (stage,) = plan.stages
    batches = [stage.batch(step) for step in range(9)]
    assert [stop - start for start, stop in batches] == [2, 3, 4, 5, 6, 8, 8, 8, 8]
    assert batches[0][0] == 0
    assert all(a[1] == b[0] for a, b in pairwise(batches))
    assert plan.tokens_before(9) == 52 * 32


@pytest.mark.parametrize(("tokens", "steps"), [(64, 1), (159, 1), (160, 2), (20 * 32, 5), (27 * 32, 5), (28 * 32, 6)])
def test_a_length_in_tokens_counts_the_ramp(tokens: int, steps: int, world: Path) -> None:
    ramp = "train.batch_ramp={start: 64, over: 5 steps}"
    assert plan_of(world, ramp, "train.steps=null", f"train.tokens={tokens}").total == steps


def test_only_stages_that_began_are_held_to_what_they_were(world: Path) -> None:
    before = staged(world)
    after = staged(world, STAGES.replace("name: anneal, steps: 4", "name: anneal, steps: 9"))
    assert before.describe() == after.describe()
    other = staged(world, STAGES.replace("seq_len: 64", "seq_len: 32"))
    assert before.describe(before=6) == other.describe(before=6)
    assert before.describe(before=7) != other.describe(before=7)


def test_caps_pass_on_what_a_small_source_cannot_give() -> None:
    rows = {"zh": 100, "en": 1000, "code": 50}
    weights = capped_weights({"zh": 1, "en": 1, "code": 2}, rows, samples=600, max_epochs=2)
    assert weights["code"] == pytest.approx(100 / 600)
    assert weights["zh"] == pytest.approx(200 / 600)
    assert weights["en"] == pytest.approx(300 / 600)
    with pytest.raises(UsageError, match=r"max_epochs=0\.1 allows no more than zh 10"):
        capped_weights({"zh": 1}, rows, samples=600, max_epochs=0.1)


def test_a_capped_run_stays_under_its_cap(world: Path) -> None:
    def passes(*more: str) -> dict[str, float]:
        return plan_of(world, "train.steps=40", "train.mixture={zh: 8, en: 1, code: 1}", *more).passes()

    assert passes()["zh"] > 1.2
    assert passes("train.max_epochs=1.2")["zh"] == pytest.approx(1.2, rel=0.01)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.stages=[{name: a, steps: 1}]"], "each has its own length"),
        (["train.steps=null", "train.stages=[{name: a, steps: 1}, {name: a, steps: 1}]"], "share a name"),
        (["train.steps=null", "train.stages=[{name: a, steps: 1, tokens: 5}]"], "exactly one of steps"),
        (["train.steps=null", "train.stages=[{name: a, steps: 1, seq_len: 48}]"], "multiple of seq_len"),
        (["train.steps=null", "train.stages=[{name: a, steps: 1, seq_len: 128}]"], "longer than model.context"),
        (["train.batch_ramp={start: 512, over: 2 steps}"], "more than batch_tokens"),
    ],
)
def test_nonsense_is_named(overrides: list[str], message: str, world: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        tiny_recipe(world, *overrides)
