"""``z2a plan --try``: the search on synthetic speeds, what it may change, its record, and the recipe it writes."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import TINY, tiny_recipe
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.machine.gpu_specs import GPUS
from zero2all.experiments import tune
from zero2all.experiments.budget import TRIAL_RUN
from zero2all.experiments.tune import TUNE_FILE, TuneOptions, tune_recipe, tune_text
from zero2all.experiments.tune_grid import build_grid, held_axes
from zero2all.experiments.tune_search import Point, find_fastest
from zero2all.planner.cluster import Cluster
from zero2all.recipe import Recipe, load_recipe, load_recipe_or_preset, parse_recipe, recipe_yaml
from zero2all.recipe.edit import edit_recipe

CPU = torch.device("cpu")


def _speeds(seed: int, sizes: tuple[int, ...], interaction: float = 0.02) -> dict[Point, float]:
    """A factor for each choice, and one for each pair of choices on two axes."""
    random = np.random.default_rng(seed)
    factors = [random.lognormal(0, 0.15, size) for size in sizes]
    pairs = {
        (a, b): random.lognormal(0, interaction, (sizes[a], sizes[b]))
        for a, b in itertools.combinations(range(len(sizes)), 2)
    }
    return {
        point: float(
            np.prod([factors[axis][choice] for axis, choice in enumerate(point)])
            * np.prod([table[point[a], point[b]] for (a, b), table in pairs.items()])
        )
        for point in itertools.product(*map(range, sizes))
    }


@pytest.mark.parametrize("sizes", [(7, 4, 2, 2), (6, 4, 2, 2), (6, 5, 4, 2, 2)])
def test_the_winner_is_within_5_percent_of_the_best_after_a_third_of_the_trials(sizes: tuple[int, ...]) -> None:
    """A trial has 2% of noise, the machine gets 0.2% slower with each, and the plan has an error of 20%. An
    exhaustive grid would take three rounds, as the finalists do."""
    gaps = []
    for seed in range(30):
        speeds, random = _speeds(seed, sizes), np.random.default_rng(1000 + seed)
        planned = {point: seconds * random.lognormal(0, 0.2) for point, seconds in speeds.items()}
        calls: list[Point] = []

        def measure(point: Point, is_final: bool) -> float:
            calls.append(point)  # noqa: B023
            return speeds[point] * float(random.lognormal(0, 0.02)) * (1 + 0.002 * len(calls))  # noqa: B023

        own = (0,) * len(sizes)
        found = find_fastest(speeds, [min(planned, key=planned.__getitem__), own], measure, rounds=3)
        gaps.append(speeds[found[0].point] / min(speeds.values()) - 1)
        assert 3 * len(set(calls)) < len(speeds) + 3, "the recipe may be one more"
        assert 3 * len(calls) < 3 * len(speeds)
        assert own in [one.point for one in found]
    assert np.mean(np.array(gaps) < 0.05) >= 0.95
    assert np.mean(gaps) < 0.015


def test_a_machine_that_gets_slower_during_the_final_rounds_changes_nothing() -> None:
    """From the fifth final trial on, all take half as long again. The slowest point then has two fast trials of three,
    the others one: medians of seconds alone would prefer it."""
    speeds = {(0,): 1.0, (1,): 1.02, (2,): 0.98}
    finals = itertools.count()

    def measure(point: Point, is_final: bool) -> float:
        return speeds[point] * (1.5 if is_final and next(finals) >= 4 else 1.0)

    found = find_fastest(speeds, [(0,)], measure, rounds=3)
    assert [one.point for one in found] == [(2,), (0,), (1,)]
    assert min(found, key=lambda one: one.seconds).point == (1,)


def test_points_that_fail_are_not_tried_again_and_do_not_win() -> None:
    speeds = _speeds(3, (5, 3, 2))
    calls: list[Point] = []

    def measure(point: Point, is_final: bool) -> float | None:
        calls.append(point)
        return None if point[0] >= 2 else speeds[point]

    found = find_fastest(speeds, [(4, 2, 1), (3, 0, 0), (0, 0, 0)], measure, rounds=3)
    assert found[0].point[0] < 2
    failed = [point for point in calls if point[0] >= 2]
    assert len(failed) == len(set(failed))
    assert find_fastest(speeds, [(4, 2, 1), (3, 0, 0)], measure, rounds=3) == []


def test_the_grid_holds_what_would_change_the_result() -> None:
    cluster = Cluster.of(GPUS["A100"], 1)
    recipe = parse_recipe(TINY, ["model.vocab_size=512"])
    grid = build_grid(recipe, cluster, CPU, fixed=())
    assert [axis.name for axis in grid.axes] == ["micro-batch", "activation checkpointing", "cross_entropy", "compile"]
    assert grid.candidates[grid.own].values == {}
    assert grid.candidates[grid.own].label == "recipe"
    assert {key for one in grid.candidates.values() for key in one.values} == {
        "train.micro_batch_tokens", "parallel.activation_checkpointing", "parallel.activation_checkpointing_every",
        "model.ops.cross_entropy", "train.compile",
    }  # fmt: skip
    fixed = build_grid(recipe, cluster, CPU, fixed={"train.compile"})
    assert "compile" not in [axis.name for axis in fixed.axes]
    dropout = parse_recipe(TINY, ["model.vocab_size=512", "model.residual_dropout=0.1"])
    assert "micro-batch" in held_axes(dropout)
    assert [axis.name for axis in build_grid(dropout, cluster, CPU, ()).axes] == [
        "activation checkpointing",
        "cross_entropy",
    ]


def test_what_does_not_fit_is_left_out_but_the_recipe_is_not() -> None:
    small = Cluster.of(replace(GPUS["A100"], memory=1), 1)
    grid = build_grid(parse_recipe(TINY, ["model.vocab_size=512"]), small, CPU, fixed=())
    assert list(grid.candidates) == [grid.own]
    assert grid.too_large > 20


def test_layouts_of_several_ranks_come_from_the_plan_and_load() -> None:
    """With a recipe that sets what most layouts do not: overrides reset it."""
    words = ["train.precision=bf16", "train.batch_tokens=256Ki", "train.micro_batch_tokens=4Ki"]
    words += [
        "parallel.tp=2",
        "parallel.reshard_after_forward=always",
        "parallel.dp_shard=2",
        "parallel.dp_replicate=2",
    ]
    recipe = load_recipe_or_preset("z2all-1.1b", words)
    grid = build_grid(recipe, Cluster.of(GPUS["H100"], 8), torch.device("cuda"), fixed={"model.ops.attention"})
    assert grid.axes[0].name == "layout"
    assert len(grid.axes[0].choices) == 6
    for point in grid.candidates:
        if not any(point[1:]):
            one = load_recipe_or_preset("z2all-1.1b", [*words, *grid.candidates[point].overrides]).parallel
            assert isinstance(one.dp_shard, int)
            assert isinstance(one.dp_replicate, int)
            assert one.dp_replicate * one.dp_shard * one.tp * one.pp * one.cp == 8
    fastest = grid.candidates[grid.starts[0]]
    assert fastest.step <= min(one.step for one in grid.candidates.values())


class Machine:
    """Speeds in place of trial runs."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.kill_after: int | None = None

    def run(self, directory: Path, recipe: Recipe, name: str, ranks: int, steps: int) -> tuple[float | None, str]:
        if self.kill_after is not None and len(self.calls) == self.kill_after:
            raise KeyboardInterrupt
        self.calls.append(name)
        assert Path(recipe.run).name == TRIAL_RUN
        if recipe.train.compile is True:
            return None, "no C++ compiler"
        tokens = recipe.train.effective_micro_batch_tokens
        mode = recipe.parallel.activation_checkpointing
        return {32: 1.0, 64: 0.8, 128: 0.9, 256: 1.2}[tokens] * (1.0 if mode == "none" else 1.3), ""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(tune, "run_trial", machine.run)
    monkeypatch.setattr("zero2all.experiments.stages.build_missing_stages", lambda recipe, target: None)
    monkeypatch.setattr(tune, "choose_batch", lambda recipe: recipe)
    return machine


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    text = TINY.replace("  steps: 12\n", "  steps: 12      # a dozen\n").lstrip()
    path.write_text(f"# My recipe.\n{text}\nout: {tmp_path}/out\n", encoding="utf-8")
    return path


def test_the_winner_is_written_and_failures_are_recorded(machine: Machine, recipe_path: Path) -> None:
    report = tune_recipe(recipe_path, ["seed=5"], TuneOptions())
    assert report.rows[0].overrides == ["train.micro_batch_tokens=64"] or report.rows[0].overrides[0].endswith("=64")
    assert report.speedup == pytest.approx(0.9 / 0.8)
    assert report.trials == len(machine.calls)
    failed = [row for row in report.rows if row.tokens_per_second is None]
    assert failed
    assert all(row.note == "failed: no C++ compiler" for row in failed)
    text = tune_text(report)
    assert "1.12 times as fast as the recipe" in text or "1.13 times as fast as the recipe" in text
    written = recipe_path.with_name("my.tuned.yaml")
    assert report.out == str(written)
    tuned, given = load_recipe(written), load_recipe(recipe_path, ["seed=5"])
    assert tuned.train.micro_batch_tokens == 64
    assert tuned.train.model_copy(update={"micro_batch_tokens": 128}) == given.train
    assert tuned.seed == 5
    assert "# My recipe." in written.read_text(encoding="utf-8")
    assert "# a dozen" in written.read_text(encoding="utf-8")


def test_a_killed_tuner_repeats_no_trial(machine: Machine, recipe_path: Path, tmp_path: Path) -> None:
    whole = tune_recipe(recipe_path, [], TuneOptions())
    shutil.rmtree(tmp_path / "out/experiments")
    trials, machine.calls = len(machine.calls), []
    for stop in (0, 1, 3, trials - 1):
        machine.kill_after = stop
        with pytest.raises(KeyboardInterrupt):
            tune_recipe(recipe_path, [], TuneOptions())
        record = json.loads((tmp_path / "out/experiments/tune-my" / TUNE_FILE).read_text()) if stop else {"trials": []}
        assert len(record["trials"]) == stop
    machine.kill_after = None
    resumed = tune_recipe(recipe_path, [], TuneOptions())
    assert len(machine.calls) == len(set(machine.calls)) == trials
    assert resumed == whole
    with pytest.raises(UsageError, match="another recipe or other options"):
        tune_recipe(recipe_path, ["seed=7"], TuneOptions())


def test_a_recipe_of_which_nothing_runs_is_an_error(
    machine: Machine, recipe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "run_trial", lambda *args: (None, "out of memory"))
    with pytest.raises(Z2aError, match=r"no candidate could be measured; .*out of memory"):
        tune_recipe(recipe_path, [], TuneOptions())
    assert not recipe_path.with_name("my.tuned.yaml").exists()


@pytest.mark.slow
def test_a_trial_trains_and_leaves_only_its_log(workspace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workspace, f"out={tmp_path}", "run=experiments/t/x")
    directory = tmp_path / "experiments" / "t"
    trial = tune.trial_recipe(recipe)
    seconds, reason = tune.run_trial(directory, trial, "trial-001", 1, steps=3)
    assert reason == ""
    assert seconds is not None
    assert 0 < seconds < 10
    assert not trial.run_dir.exists()
    bad = tune.with_values(trial, {"model.ops.attention": "flash"})
    seconds, reason = tune.run_trial(directory, bad, "trial-002", 1, steps=3)
    assert seconds is None
    assert "model.ops.attention=flash cannot be used" in reason


EDITED = """\
# A recipe.
name: x          # its name
model: {preset: z2all-25m}   # in one line
train:
  # how long
  steps: 12      # a dozen
  optimizer:
    lr: 1e-3     # high
corpus:
"""


def test_editing_keeps_comments_and_order() -> None:
    words = ["train.compile=false", "model.ops.attention=sdpa", "parallel.zero=1", "parallel.tp=2", "train.steps=5"]
    words += ["corpus.holdout=0.1", "train.optimizer.weight_decay=0.2"]
    text = edit_recipe(EDITED, words)
    assert parse_recipe(text) == parse_recipe(EDITED, words)
    assert [line for line in text.splitlines() if line not in EDITED] == [
        "model: {ops: {attention: sdpa}, preset: z2all-25m}   # in one line",
        "  steps: 5      # a dozen",
        "    weight_decay: 0.2",
        "  compile: false",
        "corpus: {holdout: 0.1}",
        "parallel: {tp: 2, zero: 1}",
    ]
    assert edit_recipe(text, words) == text


def test_what_cannot_be_edited_is_written_in_full() -> None:
    aliased = "train: &t {steps: 5}\nname: x\nevals: {every: 3 steps}\n"
    text = edit_recipe(aliased.replace("{steps: 5}", "\n  steps: 5\n  tokens: null"), ["train.tokens=1M"])
    assert parse_recipe(text).train.tokens == 1_000_000
    assert text == recipe_yaml(parse_recipe(text))
