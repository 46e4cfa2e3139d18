"""The learning rate of a run that is resumed with another schedule, decided from its plans without training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import tiny_recipe
from zero2all.base.errors import RecipeError, UsageError
from zero2all.recipe import ExtendMode, parse_recipe, recipe_yaml
from zero2all.tokens import TokenStore
from zero2all.train.extension import ScheduleChangedError, ScheduledRun, continue_schedule
from zero2all.train.plan import Plan

STAGES = "[{name: main, steps: %d}, {name: anneal, steps: %d, schedule: {shape: linear, warmup: 0, min_lr_ratio: 0}}]"


def planned(workspace: Path, *overrides: str) -> ScheduledRun:
    recipe = tiny_recipe(workspace, *overrides)
    return ScheduledRun(recipe, Plan(recipe, TokenStore(recipe.tokens_dir, "train")))


def staged(workspace: Path, main: int, anneal: int, *overrides: str) -> ScheduledRun:
    return planned(workspace, "train.steps=null", f"train.stages={STAGES % (main, anneal)}", *overrides)


def multipliers(run: ScheduledRun, *steps: int) -> list[float]:
    wanted = steps or range(run.plan.total_steps)
    return [run.plan.stage_of(step).lr_multiplier(step) for step in wanted]


def stored(run: ScheduledRun) -> ScheduledRun:
    """As the next start reads it from the run directory."""
    recipe = parse_recipe(recipe_yaml(run.recipe))
    return ScheduledRun(recipe, Plan(recipe, run.plan.store))


def extended(before: ScheduledRun, now: ScheduledRun, step: int, mode: ExtendMode) -> ScheduledRun:
    """What a first start with ``--extend`` leaves behind."""
    with pytest.raises(ScheduleChangedError):
        continue_schedule(before, now, step, None)
    return stored(continue_schedule(before, now, step, mode))


@pytest.mark.parametrize(
    ("before", "now", "step"),
    [
        (["train.steps=12"], ["train.steps=12"], 7),
        (["train.steps=12", "train.schedule.shape=wsd"], ["train.steps=20", "train.schedule.shape=wsd"], 9),
        (["train.steps=12", "train.schedule.shape=constant"], ["train.steps=20", "train.schedule.shape=constant"], 12),
        (["train.steps=12"], ["train.steps=20"], 3),  # in the warmup, which does not depend on the length
        # Decay begins sooner than planned, but no trained step knows of it.
        (["train.steps=40", "train.schedule.shape=wsd"], ["train.steps=20", "train.schedule.shape=wsd"], 9),
        (["train.steps=12"], ["train.steps=null", "train.tokens=3072"], 7),
    ],
)
def test_nothing_is_asked_while_the_trained_steps_keep_their_learning_rate(
    before: list[str], now: list[str], step: int, workspace: Path
) -> None:
    run = planned(workspace, *now)
    assert continue_schedule(planned(workspace, *before), run, step, None) is run


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (["train.steps=20"], "stage main was trained with 12 steps, not 20"),
        (["train.steps=null", "train.tokens=5120"], "stage main was trained with 12 steps, not 20"),
        (["train.steps=null", "train.epochs=9"], "12 steps, not"),
        (["train.schedule.shape=linear"], "schedule.shape=cosine, not linear"),
        (["train.schedule.warmup=5"], "schedule.warmup=3 steps, not 5 steps"),
        (["train.schedule.min_lr_ratio=0", "train.steps=14"], "12 steps, not 14; schedule.min_lr_ratio=0.1, not 0.0"),
    ],
)
def test_a_changed_schedule_is_refused_with_the_learning_rates_of_every_choice(
    now: list[str], said: str, workspace: Path
) -> None:
    before = planned(workspace)
    with pytest.raises(ScheduleChangedError) as refused:
        continue_schedule(before, planned(workspace, *now), 8, None)
    message = str(refused.value)
    assert said in message
    assert f"{before.learning_rate(7):.2e} at step 7, the last one trained" in message
    for mode in ("constant", "rewarm", "as-planned"):
        run = continue_schedule(before, planned(workspace, *now), 8, mode)  # type: ignore[arg-type]
        last = run.plan.total_steps - 1
        rates = f"{run.learning_rate(8):.2e} at step 8, {run.learning_rate(last):.2e} at step {last}"
        assert f"--extend {mode:<12} {rates}" in message


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (["train.steps=12"], ["train.steps=10"]),
        (["train.steps=12"], ["train.steps=8"]),  # it would end where it is
        (["train.steps=12", "train.schedule.shape=wsd"], ["train.steps=9", "train.schedule.shape=wsd"]),
    ],
)
@pytest.mark.parametrize("choice", [None, "constant", "as-planned"])
def test_a_begun_stage_cannot_be_shortened(
    before: list[str], now: list[str], choice: ExtendMode | None, workspace: Path
) -> None:
    with pytest.raises(UsageError, match=r"has begun with 12 steps and cannot be shortened") as refused:
        continue_schedule(planned(workspace, *before), planned(workspace, *now), 8, choice)
    assert not isinstance(refused.value, ScheduleChangedError)  # there is no choice to offer


def test_a_stage_that_has_ended_cannot_change_but_later_ones_can(workspace: Path) -> None:
    before = staged(workspace, 6, 6)
    with pytest.raises(UsageError, match=r"stage main has ended.* step 4 was trained"):
        continue_schedule(before, staged(workspace, 6, 9, "train.schedule.min_lr_ratio=0.3"), 8, "constant")
    with pytest.raises(UsageError, match=r"stage main has ended"):  # also where no step of the next one was trained
        continue_schedule(before, staged(workspace, 6, 9, "train.schedule.min_lr_ratio=0.3"), 6, "constant")
    longer = staged(workspace, 6, 9)
    assert continue_schedule(before, longer, 6, None) is longer
    with pytest.raises(ScheduleChangedError, match="stage anneal was trained with 6 steps, not 9"):
        continue_schedule(before, longer, 8, None)


@pytest.mark.parametrize("mode", ["constant", "rewarm", "as-planned"])
def test_every_restart_computes_the_same_learning_rates(mode: ExtendMode, workspace: Path) -> None:
    before, now = planned(workspace), planned(workspace, "train.steps=20")
    first = extended(before, now, 12, mode)
    assert multipliers(first)[:12] == multipliers(before)
    for step in (12, 13, 19, 20, 5):  # before the first step, later, at the end, and after a rollback
        for choice in (mode, None):  # the same command, or one without the option
            for recipe in (now, stored(first)):  # or the recipe of the run directory
                assert multipliers(continue_schedule(first, recipe, step, choice)) == multipliers(first)


def test_an_extension_can_be_extended(workspace: Path) -> None:
    once = extended(planned(workspace), planned(workspace, "train.steps=20"), 12, "rewarm")
    twice = extended(once, planned(workspace, "train.steps=30"), 20, "constant")
    assert multipliers(twice)[:20] == multipliers(once)
    assert set(multipliers(twice)[20:]) == {multipliers(once)[19]}
    assert [(entry.step, entry.mode, entry.steps) for entry in twice.recipe.train.extensions] == [
        (12, "rewarm", 12), (20, "constant", 20),
    ]  # fmt: skip
    # A restart from before both, by the command that made the second.
    assert multipliers(continue_schedule(twice, planned(workspace, "train.steps=30"), 10, "constant")) == multipliers(
        twice
    )


def test_the_choice_can_change_until_a_step_is_trained_with_it(workspace: Path) -> None:
    before, now = planned(workspace), planned(workspace, "train.steps=20")
    first = extended(before, now, 12, "rewarm")
    other = continue_schedule(first, now, 12, "constant")
    assert multipliers(other) == multipliers(continue_schedule(before, now, 12, "constant"))
    back = continue_schedule(first, before, 12, None)  # not longer after all
    assert (multipliers(back), back.recipe.train.extensions) == (multipliers(before), [])
    assert multipliers(continue_schedule(first, now, 13, "constant")) == multipliers(first)


def test_a_choice_holds_also_if_the_trained_steps_would_keep_their_learning_rate(workspace: Path) -> None:
    wsd = ["train.schedule.shape=wsd"]
    before, now = planned(workspace, *wsd), planned(workspace, "train.steps=20", *wsd)
    assert multipliers(continue_schedule(before, now, 8, "as-planned")) == multipliers(now)
    held = continue_schedule(before, now, 8, "constant")
    assert set(multipliers(held)[7:]) == {1.0}
    assert multipliers(continue_schedule(stored(held), now, 15, "constant")) == multipliers(held)


def test_a_rollback_before_an_extension_and_another_length_ask_again(workspace: Path) -> None:
    first = extended(planned(workspace), planned(workspace, "train.steps=20"), 12, "rewarm")
    now = planned(workspace, "train.steps=16")
    with pytest.raises(
        ScheduleChangedError, match="12 steps, not 16"
    ):  # shorter than 20, which no step was trained for
        continue_schedule(first, now, 10, None)
    held = continue_schedule(first, now, 10, "constant")
    assert set(multipliers(held)[9:]) == {multipliers(first)[9]}


def test_a_later_stage_begins_where_an_extended_one_ends(workspace: Path) -> None:
    held = extended(staged(workspace, 6, 4), staged(workspace, 10, 4), 6, "constant")
    last = multipliers(held, 5)[0]
    assert multipliers(held, 9, 10) == pytest.approx([last, last])
    warm = extended(staged(workspace, 6, 4), staged(workspace, 10, 4), 5, "rewarm")
    assert multipliers(warm, 10)[0] == pytest.approx(multipliers(warm, 9)[0])


def test_samples_do_not_depend_on_an_extension(workspace: Path) -> None:
    before, now = planned(workspace), planned(workspace, "train.steps=20")
    held = extended(before, now, 12, "constant")
    assert held.plan.identity() == now.plan.identity() == before.plan.identity()
    [stage], [other] = held.plan.stages, now.plan.stages
    assert [stage.sample_range(step) for step in range(20)] == [other.sample_range(step) for step in range(20)]


def test_the_recipe_of_an_extended_run_trains_the_same_run_from_scratch(workspace: Path) -> None:
    run = extended(planned(workspace), planned(workspace, "train.steps=20"), 12, "rewarm")
    again = parse_recipe(recipe_yaml(run.recipe))
    assert multipliers(ScheduledRun(again, Plan(again, run.plan.store))) == multipliers(run)
    shorter = parse_recipe(recipe_yaml(run.recipe), ["train.steps=12"])  # an extension past the end has no effect
    assert multipliers(ScheduledRun(shorter, Plan(shorter, run.plan.store))) == multipliers(planned(workspace))


def test_extensions_that_a_user_wrote_are_checked(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = "{stage: %s, step: %d, mode: constant, schedule: {}, steps: 6}"
    with pytest.raises(RecipeError, match="extensions names other, which is not a stage"):
        planned(workspace, f"train.extensions=[{entry % ('other', 4)}]")
    with pytest.raises(RecipeError, match="in the order of their steps"):
        planned(workspace, f"train.extensions=[{entry % ('main', 4)}, {entry % ('main', 4)}]")
    with pytest.raises(UsageError, match="stage anneal begins at step 6, so it cannot be extended at step 6"):
        staged(workspace, 6, 6, f"train.extensions=[{entry % ('anneal', 6)}]")
    written = planned(
        workspace,
        "train.extensions=[{stage: main, step: 4, mode: constant, schedule: {warmup: 20 steps}, steps: 6}]",
    )
    assert multipliers(continue_schedule(planned(workspace), written, 5, None)) == multipliers(planned(workspace))
    assert "train.extensions of the recipe is ignored" in capsys.readouterr().err
