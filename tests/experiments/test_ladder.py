"""The fit of loss against compute, and ``z2a compare``."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import tiny_recipe
from zero2all.base.charts.svg import line_svg
from zero2all.base.errors import UsageError
from zero2all.experiments.ladder import (
    check_reach,
    ladder_plot,
    ladder_report,
    ladder_text,
    plan_ladder,
    size_overrides,
    size_recipe,
)
from zero2all.experiments.scaling_law import Point, PowerLaw, fit_power_law
from zero2all.experiments.summary import summarize
from zero2all.recipe import load_recipe, recipe_yaml
from zero2all.track.experiment_record import FORMAT, LADDER, ExperimentRecord, VariantResult

LAW = PowerLaw(0.6, 400.0, 0.2)
COMPUTES = [1e13, 3e13, 1e14, 3e14]


def _points(noise: float, seed: int, seeds: int = 2) -> list[Point]:
    random = np.random.default_rng(seed)
    return [Point(c, LAW(c) + noise * float(random.standard_normal())) for c in COMPUTES for _ in range(seeds)]


def test_exact_points_give_the_law_back() -> None:
    fit = fit_power_law(_points(0.0, 0))
    assert fit.law.floor == pytest.approx(LAW.floor, abs=0.01)
    assert fit.law.exponent == pytest.approx(LAW.exponent, rel=0.02)
    found = fit.predict(1e15)
    assert found.loss == pytest.approx(LAW(1e15), rel=2e-3)
    assert found.low < LAW(1e15) < found.high
    assert found.margin < 0.01


def test_the_interval_covers_new_runs_as_often_as_it_says() -> None:
    """95% of 80 ladders with noise; an interval that ignores the floor's error covers far fewer."""
    noise, inside = 0.005, 0
    for seed in range(80):
        found = fit_power_law(_points(noise, seed)).predict(1e15)
        measured = LAW(1e15) + noise * float(np.random.default_rng(10_000 + seed).standard_normal())
        inside += found.low <= measured <= found.high
    assert inside >= 72


def test_nothing_is_said_beyond_ten_times_the_largest_compute() -> None:
    fit = fit_power_law(_points(0.001, 1))
    fit.predict(2.9e15)
    with pytest.raises(UsageError, match=r"11 times the largest trained compute .* train a larger size first"):
        fit.predict(3.3e15)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([Point(1e13, 2.0)] * 3, "needs at least 4 runs of 3 sizes, and there are 3 of 1"),
        ([Point(1e13, 2.0)] * 2 + [Point(1e14, 1.9)] * 2, "there are 4 of 2"),
        ([Point(10.0**power, float(power)) for power in range(13, 18)], "does not fall with compute"),
    ],
)
def test_too_little_is_no_fit(points: list[Point], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fit_power_law(points)


@pytest.fixture
def recipe_file(workspace: Path, tmp_path: Path) -> Path:
    overrides = ("model.hidden_size=32", "model.num_attention_heads=4", "model.num_key_value_heads=2")
    recipe = tiny_recipe(workspace, f"out={tmp_path}", *overrides, "model.num_hidden_layers=2")
    path = tmp_path / "family.yaml"
    path.write_text(recipe_yaml(recipe))
    return path


def test_a_family_keeps_its_proportions(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert size_overrides(recipe, 64)[:4] == [
        "model.hidden_size=64",
        "model.num_attention_heads=8",
        "model.num_key_value_heads=4",
        "model.num_hidden_layers=4",
    ]
    assert "model.num_key_value_heads=3" in size_overrides(recipe, 24)  # 3 heads do not divide into groups of 2
    with pytest.raises(UsageError, match="width 30 is not a multiple of the head size 8: use multiples, such as 32"):
        size_overrides(recipe, 30)


def test_a_size_is_trained_for_a_multiple_of_its_parameters(recipe_file: Path) -> None:
    small, large = (size_recipe(recipe_file, [], width, 2.0) for width in (32, 64))
    assert small.tokens == 2 * small.parameters
    assert large.compute / small.compute > (large.parameters / small.parameters) ** 1.5
    with pytest.raises(UsageError, match="times the compute of the largest one of --widths"):
        check_reach(size_recipe(recipe_file, [], 256, 2.0), [small, large])


def test_a_ladder_predicts_and_is_held_to_it(recipe_file: Path) -> None:
    plan = plan_ladder(recipe_file, [], [16, 24, 32, 40], 2, 1.0, target=64)
    assert [variant.record.group for variant in plan.variants][:5] == [
        "width 16", "width 24", "width 32", "width 40", "width 64",
    ]  # fmt: skip
    records = []
    for variant in plan.variants:
        compute = float(variant.record.values["training_flops"])
        value = 0.6 + 40 * compute**-0.2 + 0.002 * math.cos(variant.record.seed)
        result = VariantResult(1, 2, 3.0, 4.0, {"bits_per_byte": value}, value, 1, "a", 1, "b")
        records.append(replace(variant.record, state="done", result=result))
    record = summarize(ExperimentRecord(FORMAT, "ladder", LADDER, plan.keys, None, variants=records))
    assert record.plot is not None
    assert record.verdicts == []
    report = ladder_report(record, size_recipe(recipe_file, [], 64, 1.0))
    assert report.prediction is not None
    assert report.measured == pytest.approx(report.prediction.loss, rel=0.02)
    text = ladder_text(report)
    assert "width 64 (not in the fit)" in text
    assert "inside the interval" in text
    plot = ladder_plot(record, report.prediction.compute)
    assert plot is not None
    assert max(x for x, _ in plot.curves[1].line) == pytest.approx(report.prediction.compute)
    assert "measured afterwards" in line_svg(plot)
