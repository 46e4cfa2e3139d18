"""The spike guard: still on clean runs, awake within three steps of bad data, and exact in what it does about it."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny_recipe
from tests.resilience.helpers import crashed, losses
from tests.resilience.poison import poison
from zero2all.errors import Z2aError
from zero2all.parallel import Spread
from zero2all.parallel.ranks import run_ranks
from zero2all.recipe import GuardRecipe, Recipe
from zero2all.resilience.guard import LATE, Guard
from zero2all.train import Run, train

LONG = [
    "train.steps=90", "train.batch_tokens=128", "train.micro_batch_tokens=null", "checkpoint.every=30 steps",
    "checkpoint.flash_every=5 steps", "train.guard.window=32",
]  # fmt: skip
GARBAGE, NEWLINES = range(50, 53), range(70, 73)


def fired(losses: list[float], norms: list[float], stages: list[int] | None = None, **options: Any) -> list[int]:
    guard = Guard(GuardRecipe(**options))
    figures = zip(losses, norms, stages or [0] * len(losses), strict=True)
    return [step for step, (loss, norm, stage) in enumerate(figures) if guard.look(step, stage, loss, norm)]


def a_course(seed: int, steps: int = 400, noise: float = 0.03) -> tuple[list[float], list[float]]:
    """A loss that falls fast, then slowly, under noise with long tails; a gradient norm that falls and flickers."""
    rng = random.Random(seed)
    loss = [
        2.5 + 4 * math.exp(-step / 60) + noise * (rng.gauss(0, 1) + rng.gauss(0, 1) ** 3 / 12) for step in range(steps)
    ]
    norm = [(0.4 + 3 * math.exp(-step / 25)) * math.exp(0.25 * rng.gauss(0, 1)) for step in range(steps)]
    return loss, norm


@pytest.mark.parametrize("seed", range(20))
def test_clean_courses_never_set_it_off(seed: int) -> None:
    assert fired(*a_course(seed)) == []


def test_a_new_stage_sets_out_on_a_new_course() -> None:
    (before, norms), (after, more) = a_course(1), a_course(2)
    loss, norm = before + [value * 0.4 for value in after[200:]], norms + more[200:]  # other text, other loss
    assert fired(loss, norm, [0] * 400 + [400] * 200) == []
    assert fired(loss, norm)[0] == 400  # the same without a change of stage is odd


@pytest.mark.parametrize(
    ("change", "what"),
    [((1.4, 1.0), "a higher loss"), ((0.6, 1.0), "a lower loss"), ((1.0, 20.0), "a longer gradient"),
     ((1.0, 1 / 20), "a shorter gradient"), ((math.nan, 1.0), "no number"), ((1.0, math.inf), "no finite gradient")],
)  # fmt: skip
def test_each_kind_of_outlier_is_seen_at_once(change: tuple[float, float], what: str) -> None:
    loss, norm = a_course(3)
    loss[200], norm[200] = loss[200] * change[0], norm[200] * change[1]
    assert fired(loss, norm) == [200]


def test_its_state_comes_back() -> None:
    loss, norm = a_course(4)
    loss[300] *= 1.5
    one, other = Guard(GuardRecipe()), Guard(GuardRecipe())
    for step in range(250):
        one.look(step, 0, loss[step], norm[step])
    other.restore(json.loads(json.dumps(one.state())))
    assert [other.look(step, 0, loss[step], norm[step]) is not None for step in range(250, 400)] == [
        step == 300 for step in range(250, 400)
    ]


@pytest.fixture(scope="module")
def poisoned(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The token store with garbage where some steps read, and nothing but newlines where others do."""
    tokens = tmp_path_factory.mktemp("poisoned") / "tokens"
    shutil.copytree(world / "tokens", tokens)
    poison(tiny_recipe(world, f"tokens.dir={tokens}", *LONG), GARBAGE, NEWLINES)
    return tokens


def guarded(world: Path, tmp_path: Path, tokens: Path, *overrides: str) -> Recipe:
    places = [f"out={tmp_path}/out", f"tokens.dir={tokens}", f"checkpoint.flash_dir={tmp_path}/memory"]
    return tiny_recipe(world, *places, *LONG, *overrides)


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.record_path.read_text().splitlines()]
    return [line for line in lines if line.get("event") == kind]


def test_bad_data_is_found_named_and_passed_over(world: Path, tmp_path: Path, poisoned: Path) -> None:
    recipe = guarded(world, tmp_path, poisoned, "train.guard.policy=rollback")
    train(recipe)
    run = Run.open(recipe.run_dir)
    found = [event["step"] for event in events(run, "spike")]
    assert len(found) == 2
    assert found[0] in GARBAGE
    assert found[1] in NEWLINES
    plan = run.plan()
    for event in events(run, "spike"):
        stage = plan.at(event["step"])
        behind = {part.gid for part in stage.samples.documents(*stage.batch(event["step"]))}
        assert {document["gid"] for document in event["documents"]} <= behind
        assert event["documents"][0]["title"]

    skipped = {step for first in found for step in range(first - LATE, first - LATE + 8)}
    assert set(GARBAGE) | set(NEWLINES) <= skipped
    assert run.checkpoints.state(90)["skipped"] == sorted(skipped)
    # Every step is in the surviving history once, or was passed over.
    assert set(losses(run)) == set(range(90)) - skipped

    # Bit for bit what the same run gives on clean text where those steps are passed over.
    clean = guarded(world, tmp_path / "clean", world / "tokens", "train.guard.policy=rollback")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guard, "look", lambda self, step, *rest: "as told" if step in found else None)
        train(clean)
    other = Run.open(clean.run_dir)
    assert losses(other) == losses(run)


def test_a_crash_after_a_rollback_forgets_nothing(world: Path, tmp_path: Path, poisoned: Path) -> None:
    whole = guarded(world, tmp_path / "whole", poisoned, "train.guard.policy=rollback")
    train(whole)
    recipe = guarded(world, tmp_path, poisoned, "train.guard.policy=rollback")
    crashed(recipe, 66)
    assert train(recipe)["resumed_at"] == 65
    assert losses(Run.open(recipe.run_dir)) == losses(Run.open(whole.run_dir))


def test_an_update_is_left_out(world: Path, tmp_path: Path, poisoned: Path) -> None:
    recipe = guarded(world, tmp_path, poisoned, "train.guard.policy=skip", "train.steps=60")
    moved: dict[int, torch.Tensor] = {}
    with pytest.MonkeyPatch.context() as patch:
        original = Spread.even_load

        def look(self: Spread) -> None:
            original(self)
            moved[len(moved)] = next(self.model.parameters()).detach().clone()

        patch.setattr(Spread, "even_load", look)
        train(recipe)
    found = [event["step"] for event in events(Run.open(recipe.run_dir), "spike")]
    assert set(found) == set(GARBAGE)
    for step in range(1, 60):
        assert torch.equal(moved[step], moved[step - 1]) == (step in found)


def test_warning_changes_nothing(world: Path, tmp_path: Path, poisoned: Path) -> None:
    warned = guarded(world, tmp_path, poisoned, "train.steps=60")
    train(warned)
    assert events(Run.open(warned.run_dir), "spike")[0]["step"] in GARBAGE
    deaf = guarded(world, tmp_path / "deaf", poisoned, "train.steps=60", "train.guard.threshold=1e9")
    train(deaf)
    assert losses(Run.open(warned.run_dir)) == losses(Run.open(deaf.run_dir))


@pytest.mark.parametrize("times", [1, 2])
def test_what_is_not_finite_is_done_again_before_its_data_is_blamed(
    times: int, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = guarded(world, tmp_path / "clean", world / "tokens", "train.steps=30")
    train(clean)
    recipe = guarded(world, tmp_path, world / "tokens", "train.steps=30", "train.guard.policy=rollback")
    left, at = [times], [0]
    original = Spread.clip

    def clip(self: Spread, longest: float) -> torch.Tensor:
        if at[0] == 17 and left[0]:
            left[0] -= 1
            next(iter(self.model.parameters())).grad.fill_(math.nan)  # type: ignore[union-attr]
        return original(self, longest)

    monkeypatch.setattr(Spread, "clip", clip)
    train(recipe, on_batch=lambda batch: at.__setitem__(0, batch.step))
    run = Run.open(recipe.run_dir)
    if times == 1:
        assert losses(run) == losses(Run.open(clean.run_dir))
    else:
        assert set(losses(run)) == set(range(30)) - set(range(15, 23))


def test_a_loss_that_never_recovers_stops_the_run(world: Path, tmp_path: Path) -> None:
    recipe = guarded(world, tmp_path, world / "tokens", "train.guard.policy=skip", "train.steps=40")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guard, "look", lambda self, step, *rest: "as told" if step > 5 else None)
        with pytest.raises(Z2aError, match="20 odd steps in a row, the last 26"):
            train(recipe)


def guarded_on_ranks(recipe: Recipe) -> None:
    train(recipe)


@pytest.mark.slow
def test_all_ranks_decide_the_same(world: Path, tmp_path: Path, poisoned: Path) -> None:
    recipe = guarded(world, tmp_path, poisoned, "train.guard.policy=rollback", "parallel.dp_shard=2")
    run_ranks(2, guarded_on_ranks, recipe)
    run = Run.open(recipe.run_dir)
    found = [event["step"] for event in events(run, "spike")]
    assert [found[0] in GARBAGE, found[1] in NEWLINES, len(found)] == [True, True, 2]
    skipped = {step for first in found for step in range(first - LATE, first - LATE + 8)}
    assert set(losses(run)) == set(range(90)) - skipped
