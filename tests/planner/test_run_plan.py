"""A run writes what was planned of it, and its report shows that beside what it measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.conftest import tiny_recipe
from zero2all.base.io import write_record
from zero2all.base.machine.devices import hardware_key
from zero2all.base.machine.gpu_specs import GPUS
from zero2all.cli.main import app
from zero2all.experiments.planned_run import record_plan
from zero2all.planner.calibrated import machine_entry, user_entry_path
from zero2all.track.run_locations import PLAN_FILE, LocalRunLocation
from zero2all.track.run_view import RunView, run_checks
from zero2all.train import TrainerHooks, train

CPU = torch.device("cpu")


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has an entry, with made-up numbers."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = user_entry_path(hardware_key(CPU))
    path.parent.mkdir(parents=True)
    write_record(path, replace(GPUS["T4"], name="here", flops=1e11, fp32_flops=1e11, memory=2**34))


def _view(directory: Path) -> RunView:
    view = RunView(LocalRunLocation(directory))
    view.read_to_end()
    return view


@pytest.mark.usefixtures("calibrated")
def test_the_report_of_a_run_has_its_plan(workspace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workspace, f"out={tmp_path / 'out'}", "train.steps=6")
    summary = train(recipe, TrainerHooks(on_run=record_plan))
    checks = {one.name: one for one in run_checks(_view(Path(summary.run)))}
    assert {"step time", "tokens per second", "peak memory", "optimizer"} <= set(checks)
    assert all(one.planned > 0 and one.measured > 0 for name, one in checks.items() if name != "exposed communication")
    page = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["watch", summary.run, "--html", str(page)])
    assert done.exit_code == 0, done.output
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert match is not None
    (plan,) = json.loads(match[1])["plans"]
    assert (plan["hardware"], plan["ranks"]) == ("here", 1)
    assert plan["checks"][0]["name"] == "step time"
    assert plan["checks"][0]["planned"] == pytest.approx(checks["step time"].planned)


@pytest.mark.parametrize("content", ["{", "[]", '{"hardware": 1}', '{"hardware": "a", "ranks": 1, "values": 3}'])
def test_a_damaged_plan_is_reported_and_not_used(tmp_path: Path, content: str) -> None:
    (tmp_path / PLAN_FILE).write_text(content)
    view = _view(tmp_path)
    assert run_checks(view) == []
    assert any(line.startswith(PLAN_FILE) for line in view.damage)


def test_unknown_hardware_has_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert machine_entry(CPU) is None


def test_reports_do_not_load_torch() -> None:
    code = "import sys, zero2all.track.html_report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
