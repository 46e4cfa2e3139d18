"""The entry that ``z2a doctor --calibrate`` writes, and plans against runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from zero2all.base.errors import UsageError
from zero2all.base.machine.gpu_specs import Gpu
from zero2all.cli.main import app
from zero2all.experiments.planned_run import check_plan, check_text, read_run
from zero2all.planner.calibrated import MachineMeasurements, calibrated_entry, find_entry, machine_entry
from zero2all.planner.cluster import Cluster
from zero2all.planner.plan import plan_run
from zero2all.recipe import Recipe, load_recipe_or_preset, recipe_yaml
from zero2all.track import RunRecord
from zero2all.train.hyperparameters import fill_hyperparameters

MEASURED = MachineMeasurements(
    device="cpu",
    device_name="a CPU",
    dtype="fp32",
    product_flops={512: 80e9, 1024: 100e9},
    step_seconds=3.0,
    memory=16 * 2**30,
    memory_bandwidth=10e9,
    link_bandwidth=1e9,
    multiprocessors=1,
    ranks_per_node=2,
)


def _recipe(*overrides: str) -> Recipe:
    return fill_hyperparameters(load_recipe_or_preset("z2all-10m", ["train.precision=fp32", *overrides]))


def _entry(step_seconds: float = 3.0) -> Gpu:
    return calibrated_entry("here", replace(MEASURED, step_seconds=step_seconds), _recipe())


@pytest.mark.parametrize("seconds", [1.5, 3.0, 9.0])
def test_the_plan_of_the_reference_takes_as_long_as_was_measured(seconds: float) -> None:
    planned = plan_run(_recipe(), Cluster.of(_entry(seconds), 1))
    assert planned.step.expected == pytest.approx(seconds, rel=1e-3)
    twice = plan_run(_recipe("train.batch_tokens=4096"), Cluster.of(_entry(seconds), 1))
    assert 1.5 * seconds < twice.step.expected < 2.2 * seconds


def test_an_entry_is_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.bench.calibrate.measure_machine", lambda recipe: MEASURED)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "here.json"
    result = CliRunner().invoke(app, ["doctor", "--calibrate", str(path)])
    assert result.exit_code == 0, result.output
    assert f"plan with it: z2a plan RECIPE --gpus 1 --gpu {path}" in result.stdout
    entry = find_entry(str(path))
    assert machine_entry(torch.device("cpu")) == entry
    assert (entry.name, entry.flops, entry.peak_flops("fp32")) == ("here", 100e9, 100e9)
    planned = CliRunner().invoke(app, ["plan", "z2all-10m", "--gpus", "1", "--gpu", str(path), "--json"])
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["plan"]["cluster"]["gpu"]["name"] == "here"


@pytest.mark.parametrize("content", [None, "{", "[]", '{"name": 1}', json.dumps({"name": "a", "flops": "x"})])
def test_a_file_that_is_no_entry_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=r"--gpu: .*a\.json .*z2a doctor --calibrate"):
        find_entry(str(path))


def test_planned_values_stand_beside_those_of_a_run(tmp_path: Path) -> None:
    usual = {"step_time": 3.3, "tokens_per_second": 620.0, "tflops": 0.05, "memory": 5e8, "time/optimizer": 0.1}
    with RunRecord(tmp_path / "record.jsonl", rank=0, sinks=[], system_every=None) as record:
        record.step(0, step_time=50.0, tokens_per_second=1.0)  # warms up
        for step in range(1, 11):
            record.step(step, **usual)
    planned = plan_run(_recipe(), Cluster.of(_entry(), 1))
    checks = {check.name: check for check in check_plan(planned, read_run(tmp_path, _recipe()))}
    assert checks["step time"].ratio == pytest.approx(1.1, rel=0.01)
    assert checks["peak memory"].measured == pytest.approx(0.5)
    assert "exposed communication" not in checks  # the run did not measure it
    assert "1.10x" in check_text(list(checks.values()))
    with pytest.raises(UsageError, match="has no steps to compare with"):
        read_run(tmp_path / "nothing", _recipe())
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(_recipe()))
    read_run(tmp_path, _recipe())
    with pytest.raises(UsageError, match="trained another model or batch than the plan is for: plan the run itself"):
        read_run(tmp_path, _recipe("train.batch_tokens=4096"))
