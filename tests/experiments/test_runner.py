"""The runner, with processes that stand in for training: what is recorded, resumed, refused and stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from tests.conftest import TINY
from tests.experiments.helpers import Training, result
from zero2all.base.errors import UsageError, Z2aError
from zero2all.experiments import runner
from zero2all.experiments.runner import run_experiment
from zero2all.experiments.variants import ExperimentPlan, plan_sweep
from zero2all.recipe import Recipe
from zero2all.track.experiment_record import EXPERIMENT_FILE, VariantResult, read_experiment

LR = "train.optimizer.lr=1e-3,2e-3,4e-3"


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., ExperimentPlan]:
    path = tmp_path / "my.yaml"
    path.write_text(f"{TINY}\nout: {tmp_path}/out\n", encoding="utf-8")

    def make(*words: str, seeds: int = 1, name: str = "lr") -> ExperimentPlan:
        return plan_sweep(path, words or [LR], seeds, name)

    return make


Plan = Callable[..., ExperimentPlan]


def test_finished_variants_are_not_repeated_and_new_ones_are_added(training: Training, plan: Plan) -> None:
    record = run_experiment(plan())
    assert [variant.state for variant in record.variants] == ["done"] * 3
    assert {one.reference for one in record.verdicts} == {"lr=2e-3"}
    assert {one.other for one in record.verdicts} == {"lr=1e-3", "lr=4e-3"}
    assert record == read_experiment(plan().directory / EXPERIMENT_FILE)
    before = list(training.calls)
    assert run_experiment(plan()) == record
    assert training.calls == before
    more = run_experiment(plan("train.optimizer.lr=2e-3,4.5e-3", seeds=2))
    assert training.calls[3:] == ["lr-4.5e-3-seed11", "lr-2e-3-seed12", "lr-4.5e-3-seed12"]
    assert len(more.variants) == 6
    assert [variant.seed for variant in more.variants if variant.group == "lr=2e-3"] == [11, 12]


def test_a_variant_that_fails_is_recorded_with_its_reason_and_tried_again(training: Training, plan: Plan) -> None:
    scripts = {
        "lr-1e-3-seed11": "echo 'error: an earlier one'; echo 'error: loss nan'; exit 1",
        "lr-2e-3-seed11": "kill -9 $$",
    }
    training.script = lambda name: scripts.get(name, "exit 0")
    record = run_experiment(plan())
    assert [variant.state for variant in record.variants] == ["failed", "failed", "done"]
    assert record.variants[0].reason == "loss nan"
    assert "SIGKILL" in record.variants[1].reason
    assert "OOM killer" in record.variants[1].reason
    training.script = lambda name: "exit 0"
    record = run_experiment(plan())
    assert training.calls[3:] == ["lr-1e-3-seed11", "lr-2e-3-seed11"]
    assert {(variant.state, variant.reason) for variant in record.variants} == {("done", "")}


def test_a_result_that_is_not_finite_is_a_failure(
    training: Training, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(directory: Path) -> VariantResult:
        if "1e-3" in directory.name:
            raise Z2aError("the bits per byte are not finite")
        return training.result(directory)

    monkeypatch.setattr(runner, "_read_result", read)
    record = run_experiment(plan())
    assert (record.variants[0].state, record.variants[0].reason) == ("failed", "the bits per byte are not finite")


def test_if_every_variant_fails_so_does_the_experiment(training: Training, plan: Plan) -> None:
    training.script = lambda name: "echo 'error: no space left'; exit 1"
    with pytest.raises(Z2aError, match=r"every run failed; lr-1e-3-seed11: no space left"):
        run_experiment(plan())


def test_a_runner_that_was_killed_repeats_only_what_was_not_finished(training: Training, plan: Plan) -> None:
    run_experiment(plan())
    path = plan().directory / EXPERIMENT_FILE
    record = json.loads(path.read_text())
    record["variants"][1] |= {"state": "running", "result": None}  # as SIGKILL leaves it
    path.write_text(json.dumps(record))
    training.calls.clear()
    assert [variant.state for variant in run_experiment(plan()).variants] == ["done"] * 3
    assert training.calls == ["lr-2e-3-seed11"]


@pytest.mark.parametrize(
    ("words", "budget", "message"),
    [
        ([LR, "train.steps=13"], None, "the recipe of lr-1e-3-seed11 in experiment lr was another one"),
        ([LR], "500-steps", "the budget of experiment lr is the length in the recipe, not 500-steps"),
        (["model.num_hidden_layers=2,3"], None, "experiment lr is a sweep of train.optimizer.lr"),
    ],
)
def test_another_experiment_of_the_same_name_is_refused(
    training: Training, plan: Plan, words: list[str], budget: str | None, message: str
) -> None:
    run_experiment(plan())
    with pytest.raises(UsageError, match=f"{message}: choose another --name"):
        run_experiment(plan(*words), budget)
    assert len(training.calls) == 3


def test_two_runners_of_one_experiment_are_refused(training: Training, plan: Plan) -> None:
    training.script = lambda name: f"while [ ! -e {plan().directory}/go ]; do sleep 0.05; done"
    first = threading.Thread(target=run_experiment, args=(plan(),))
    first.start()
    try:
        assert training.started.wait(60)
        with pytest.raises(
            UsageError, match=r"\(process \d+ on .*\): wait for it, stop it, or give this one .*--name NAME"
        ):
            run_experiment(plan())
    finally:
        (plan().directory / "go").touch()
        first.join(60)
    assert [variant.state for variant in run_experiment(plan()).variants] == ["done"] * 3


def test_ctrl_c_stops_the_variant_gracefully_and_the_same_call_continues(training: Training, plan: Plan) -> None:
    saved = plan().directory / "saved"
    training.script = lambda name: f"trap 'touch {saved}; exit 1' TERM; echo ready; while :; do sleep 0.05; done"
    log = plan().directory / "logs" / "lr-1e-3-seed11.log"

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=interrupt)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        run_experiment(plan())
    presser.join()
    assert saved.exists(), "the process had the time to save"
    record = read_experiment(plan().directory / EXPERIMENT_FILE)
    assert [variant.state for variant in record.variants] == ["stopped", "planned", "planned"]
    training.script = lambda name: "exit 0"
    assert [variant.state for variant in run_experiment(plan()).variants] == ["done"] * 3


def test_ctrl_c_while_a_variant_starts_stops_it_gracefully(
    training: Training, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, start = plan().directory / "saved", runner.start_variant
    training.script = lambda name: f"trap 'touch {saved}; exit 1' TERM; echo ready; while :; do sleep 0.05; done"

    def interrupted(recipe: Path, ranks: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
        process = start(recipe, ranks, log)
        while not Path(log.name).stat().st_size:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(runner, "start_variant", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(plan())
    assert saved.exists()
    assert read_experiment(plan().directory / EXPERIMENT_FILE).variants[0].state == "stopped"


def test_a_time_budget_is_measured_once_and_fixes_the_number_of_steps(
    training: Training, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, trials = iter([0.5, 0.1]), []

    def run_trial(directory: Path, recipe: Recipe, name: str, ranks: int, steps: int) -> tuple[float | None, str]:
        trials.append(name)
        return next(seconds), ""

    monkeypatch.setattr(runner, "run_trial", run_trial)
    words = ["model.num_hidden_layers=2,3", "train.optimizer.lr=1e-3,2e-3"]
    monkeypatch.setattr(runner, "_read_result", lambda directory: result(2.0))
    record = run_experiment(plan(*words, name="time"), "1m")
    assert trials == ["speed-trial", "speed-trial"]
    assert [variant.steps for variant in record.variants] == [120, 120, 600, 600]
    assert "steps: 600" in training.recipes[record.variants[2].name]
    again = run_experiment(plan(*words, name="time", seeds=2), "1m")  # nothing is measured a second time
    assert [variant.steps for variant in again.variants] == [120, 120, 600, 600] * 2


def test_a_speed_that_cannot_be_measured_is_an_error_with_the_reason(training: Training, plan: Plan) -> None:
    training.script = lambda name: "echo 'error: out of memory'; exit 1"
    with pytest.raises(Z2aError, match=r"the speed of lr=1e-3 could not be measured: out of memory"):
        run_experiment(plan(), "1m")


def test_a_damaged_record_is_not_overwritten(training: Training, plan: Plan) -> None:
    path = plan().directory / EXPERIMENT_FILE
    path.parent.mkdir(parents=True)
    path.write_text('{"format": 1, "name": "lr"')
    with pytest.raises(Z2aError, match="is damaged"):
        run_experiment(plan())
    assert path.read_text() == '{"format": 1, "name": "lr"'


def test_the_record_is_written_before_the_first_variant_starts(training: Training, plan: Plan) -> None:
    directory = plan().directory
    training.script = lambda name: f"cp {directory}/{EXPERIMENT_FILE} {directory}/{name}.seen"
    run_experiment(plan())
    states = [
        [variant["state"] for variant in json.loads((directory / f"lr-{lr}-seed11.seen").read_text())["variants"]]
        for lr in ("1e-3", "2e-3", "4e-3")
    ]
    assert states == [["running", "planned", "planned"], ["done", "running", "planned"], ["done", "done", "running"]]


def test_a_variant_without_an_evaluation_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run in"):
        runner._read_result(tmp_path)


def test_what_a_process_prints_is_kept_in_its_log(training: Training, plan: Plan) -> None:
    training.script = lambda name: f"echo hello from {name}"
    run_experiment(plan())
    assert (plan().directory / "logs" / "lr-2e-3-seed11.log").read_text() == "hello from lr-2e-3-seed11\n"
