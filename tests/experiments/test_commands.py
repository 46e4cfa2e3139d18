"""``z2a compare`` and ``z2a compare`` with real training: killed and resumed, within a budget, on two ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_recipe
from tests.processes import MARK, gone
from zero2all.experiments.evaluate import evaluate
from zero2all.recipe import recipe_yaml
from zero2all.track import read_steps
from zero2all.track.experiment_record import ExperimentRecord, read_experiment
from zero2all.train import Run, train

# Every run is a process that imports torch.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
STEPS = 240
RATES = ("1e-3", "4e-3")


@pytest.fixture
def recipe(workspace: Path, tmp_path: Path) -> Path:
    options = [f"out={tmp_path}/out", f"train.steps={STEPS}", "checkpoint.every=20 steps", "evals.every=80 steps"]
    path = tmp_path / "my.yaml"
    path.write_text(recipe_yaml(tiny_recipe(workspace, *options)), encoding="utf-8")
    return path


def start(mark: str, *words: object) -> subprocess.Popen[str]:
    program = [sys.executable, "-c", "from zero2all.cli.main import main; main()", *map(str, words)]
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=900)
    return process.returncode, out, err


def z2a(*words: object) -> Any:
    status, out, err = finish(start("", *words, "--json"))
    assert status == 0, err
    return json.loads(out)


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    deadline = time.monotonic() + 300
    record = run / "record.jsonl"
    while not record.exists() or max(read_steps(record), default=-1) < step:
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_sweep_that_was_stopped_and_killed_ends_with_the_results_of_one_that_was_not(
    recipe: Path, workspace: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "out" / "experiments" / "lr"
    words = ["compare", recipe, f"train.optimizer.lr={','.join(RATES)},1e12", "--name", "lr"]
    first = directory / "lr-1e-3-seed11"

    def record() -> ExperimentRecord:
        return read_experiment(directory / "experiment.json")

    mark = uuid.uuid4().hex
    stopped = start(mark, *words)
    wait_for_step(stopped, first, 30)
    stopped.send_signal(signal.SIGINT)
    status, _, err = finish(stopped)
    assert status == 1, err
    gone(mark)
    assert [variant.state for variant in record().variants] == ["stopped", "planned", "planned"]
    log = (directory / "logs" / f"{first.name}.log").read_text()
    found = re.search(r"stopped after step (\d+) of 240", log)
    assert found is not None, log
    at = int(found[1])
    assert Run.open(first).checkpoints.is_valid(at)

    mark = uuid.uuid4().hex
    killed = start(mark, *words)
    wait_for_step(killed, first, at + 40)
    killed.kill()
    finish(killed)
    gone(mark)  # the training process ended with it
    assert record().variants[0].state == "running"

    status, out, err = finish(start(mark, *words))
    assert status == 0, err
    assert "the best train.optimizer.lr" in out or "is best" in out or "noise" in out
    variants = {variant.values["train.optimizer.lr"]: variant for variant in record().variants}
    failed = variants[1e12]
    assert failed.state == "failed"
    assert "loss" in failed.reason
    for rate in RATES:
        options = [f"out={tmp_path}/plain", f"run=lr-{rate}", f"train.steps={STEPS}", f"train.optimizer.lr={rate}"]
        plain = tiny_recipe(workspace, *options)
        train(plain)
        variant = variants[float(rate)]
        assert variant.result is not None
        assert variant.result.metrics == evaluate(Run.open(plain.run_dir)).metrics
        losses = [
            {step: repr(values["loss"]) for step, values in read_steps(run / "record.jsonl").items()}
            for run in (plain.run_dir, directory / variant.name)
        ]
        assert losses[0] == losses[1]
    assert (directory / "sweep.svg").exists()


def test_one_recipe_twice_is_no_difference_and_an_eighth_of_the_rate_is_one(recipe: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow.yaml"
    slow.write_text(recipe.read_text().replace("lr: 0.005", "lr: 0.000625"), encoding="utf-8")
    same = z2a("compare", recipe, recipe, "--budget", "60-steps", "--seeds", 3)
    assert same["verdicts"][0].startswith("no difference beyond the noise between seeds: ")
    assert same["differences"] == {}
    other = z2a("compare", recipe, slow, "--budget", "60-steps", "--seeds", 3)
    assert other["verdicts"][0].startswith("my is better than slow by ")
    assert list(other["differences"]) == ["train.optimizer.lr"]
    again = z2a("compare", tmp_path / "out" / "experiments" / "my-vs-slow")
    assert again["verdicts"] == other["verdicts"]


def test_a_time_budget_fixes_the_steps_of_every_run(recipe: Path, tmp_path: Path) -> None:
    found = z2a("compare", recipe, "train.optimizer.lr=1e-3,4e-3", "--budget", "3s", "--name", "time")
    variants = found["experiment"]["variants"]
    assert len({variant["steps"] for variant in variants}) == 1
    assert all(variant["result"]["steps"] == variant["steps"] > 1 for variant in variants)
    assert not (tmp_path / "out" / "experiments" / "time" / "speed-trial").exists()


def test_runs_on_two_ranks(recipe: Path) -> None:
    found = z2a("compare", recipe, "--budget", "8-steps", "--gpus", 2, "--name", "ranks")
    [variant] = found["experiment"]["variants"]
    assert variant["state"] == "done"
    assert variant["result"]["steps"] == 8


def test_missing_stages_are_built_and_every_tokenizer_has_its_own(workspace: Path, tmp_path: Path) -> None:
    path = tmp_path / "fresh.yaml"
    own = ["corpus.dir=null", "tokenizer.dir=null", "tokens.dir=null", f"out={tmp_path}/fresh", "train.steps=8"]
    path.write_text(recipe_yaml(tiny_recipe(workspace, *own, "evals.tokens=1M")), encoding="utf-8")
    found = z2a("compare", path, "tokenizer.vocab_size=512,768", "--name", "vocab")
    results = [variant["result"] for variant in found["experiment"]["variants"]]
    assert len({result["tokenizer"] for result in results}) == 2
    assert len({result["validation_set"] for result in results}) == 1
    assert found["remarks"][0] == "the runs have different tokenizers: compare bits per byte, not losses"
    assert {path.name for path in (tmp_path / "fresh").iterdir()} >= {"documents", "tokenizer", "tokens"}
    own_stages = {path.name.split("-")[0] for path in (tmp_path / "fresh/experiments/vocab/stages").iterdir()}
    assert own_stages == {"tokenizer", "tokens"}
