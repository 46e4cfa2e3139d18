"""Goodput of a run, and the modelled cost of failures."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from tests.checkpoint.helpers import crashed
from tests.conftest import tiny_recipe
from zero2all.checkpoint.checkpoint_interval import FAILURE_RATES, FailureModel
from zero2all.planner.run_cost import Pauses, failure_costs
from zero2all.track.goodput import compute_goodput, compute_run_goodput, count_restarts
from zero2all.track.record_lines import EventLine, parse_record_line
from zero2all.train import Run, train


def test_every_second_of_a_record_has_one_category() -> None:
    lines = [
        {"event": "start", "time": 110.0, "step": 0, "startup": 10.0},
        *({"step": step, "time": 111.0 + step, "loss": 1.0} for step in range(4)),  # to 114
        {"step": 3, "time": 114.5, "checkpoint_stall": 0.5},
        {"step": 3, "time": 114.7, "system/load": 1.0},  # not counted
        {"event": "evaluation", "time": 116.5, "step": 3},
        {"sample": "en", "time": 117.5, "step": 3, "text": "Once"},
        {"step": 3, "time": 117.6, "checkpoint_stall": 0.1},
        {"step": 4, "time": 118.6, "loss": 1.0},
        {"step": 5, "time": 119.5, "loss": 1.0},
        # Killed; another process begins 20 s later, at step 4.
        {"event": "resume", "time": 144.5, "step": 4, "startup": 5.0},
        {"step": 4, "time": 145.5, "loss": 1.0},
        # A rollback: half a second to load, and one step wasted.
        {"event": "resume", "time": 146.0, "step": 4},
        {"step": 5, "time": 147.0, "loss": 1.0},
        {"event": "checkpoint", "time": 147.2, "step": 4, "seconds": 30},  # in the background
        # Hung; found and started again.
        {"event": "resume", "time": 250.0, "step": 6, "startup": 3.0},
        {"step": 6, "time": 251.0, "loss": 1.0},
        {"event": "stopped", "time": 251.5, "step": 7},
        # Time while stopped is not lost.
        {"event": "resume", "time": 9999.0, "step": 7, "startup": 2.0},
        {"step": 7, "time": 10000.0, "loss": 1.0},
        {"event": "done", "time": 10001.0, "step": 8},
    ]
    parsed = [parse_record_line(json.dumps(line).encode()) for line in lines]
    assert count_restarts(line for line in parsed if isinstance(line, EventLine)) == 2
    report = compute_goodput(parsed, hangs=[200.0])
    assert report.lost == pytest.approx(
        {
            "start-up": 10 + 5 + 3 + 2, "checkpoint stall": 0.5 + 0.1 + 0.5 + 1, "evaluation": 3.0,
            "recomputed steps": 1.9 + 0.5 + 1, "hang": 100.0, "failure": 20.0,
        }
    )  # fmt: skip
    assert report.steps == pytest.approx(4 + 1 + 1 + 1)
    assert report.seconds == pytest.approx((251.5 - 100) + (10001 - 9997))
    assert report.goodput == pytest.approx(7 / report.seconds, abs=1e-4)
    assert (report.restarts, report.steps_done_again) == (2, 3)


def test_a_run_logs_its_goodput_over_restarts(workspace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workspace, f"out={tmp_path}")
    begin = time.time()
    crashed(recipe, 6)
    summary = train(recipe)
    run = Run.open(tmp_path)
    lines = [json.loads(line) for line in run.record_path.read_text().splitlines()]
    [end] = [line["time"] for line in lines if line.get("event") == "done"]
    took = end - begin
    [logged] = [line for line in lines if line.get("event") == "goodput"]
    assert logged["goodput"] == summary.goodput
    assert 0 < logged["goodput"] < 1
    assert (logged["restarts"], logged["steps_done_again"]) == (1, 2)
    # All but what this process did before it first trained, which may count as its start-up.
    assert logged["seconds"] >= 0.9 * took - 0.1
    assert compute_run_goodput(run.directory).steps == pytest.approx(logged["steps"], abs=0.01)


def simulate_goodput(model: FailureModel, interval: float, hours: float, seed: int) -> float:
    """Goodput by event simulation: work, stalls, random failures (also during recovery), lost work repeated."""
    rng = random.Random(seed)
    now = forward = 0.0
    while now < hours * 3600.0:
        failure = now + rng.expovariate(1 / model.mtbf)
        forward += (failure - now) // (interval + model.stall) * interval  # work after the last checkpoint is lost
        now = failure
        while (again := rng.expovariate(1 / model.mtbf)) < model.recovery:
            now += again  # a failure during recovery restarts it
        now += model.recovery
    return forward / now


@pytest.mark.parametrize("stall", [0.1, 2.0, 60.0])
@pytest.mark.parametrize("recovery", [15.0, 600.0])
@pytest.mark.parametrize("between", [3600.0, 43200.0])
def test_the_simulation_agrees_with_the_formula(stall: float, recovery: float, between: float) -> None:
    job = FailureModel(between, stall, recovery)
    assert simulate_goodput(job, job.daly_interval, hours=10000, seed=1) == pytest.approx(
        job.goodput(job.daly_interval), rel=0.005
    )


@pytest.mark.parametrize("stall", [0.1, 2.0, 60.0])
def test_no_other_interval_is_better(stall: float) -> None:
    job = FailureModel(7200.0, stall, 30.0)
    best = max(job.goodput(job.daly_interval * factor / 100) for factor in range(20, 500))
    assert job.goodput(job.daly_interval) == pytest.approx(best, rel=1e-5)
    assert job.goodput(job.young_interval) == pytest.approx(best, rel=1e-2)


def test_the_table_has_every_published_rate() -> None:
    rows = failure_costs(16384, Pauses(stall=1.0, recovery=60.0))
    assert [row.rate for row in rows] == list(FAILURE_RATES)
    # 466 interruptions in 54 days are one in 2 h 47 min.
    assert rows[-1].between == pytest.approx(54 * 86400 / 466)
    assert rows[-1].goodput == pytest.approx(FailureModel(rows[-1].between, 1.0, 60.0).goodput(rows[-1].daly))
