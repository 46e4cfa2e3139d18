"""Runs that are resumed with another schedule: trained, interrupted, restarted on several ranks, refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from tests.conftest import tiny_recipe
from tests.train.runs import ctrl_c_at, weights
from zero2all.base.errors import Interrupted, UsageError
from zero2all.bench.rank_harness import run_ranks
from zero2all.cli.main import app
from zero2all.recipe import ExtendMode, Recipe, load_recipe, recipe_yaml
from zero2all.tokens import TokenStore
from zero2all.track import read_steps
from zero2all.train import Run, ScheduleChangedError, TrainerHooks, train
from zero2all.train.data_loader import Batch
from zero2all.train.plan import Plan
from zero2all.train.show_plan import LRHistory, lr_plot

LONGER = "train.steps=10"
OPTIONS = ["train.steps=6", "checkpoint.every=2 steps", "checkpoint.keep_every=2 steps"]


@pytest.fixture(scope="module")
def finished(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps, whose cosine schedule has ended."""
    out = tmp_path_factory.mktemp("finished") / "out"
    train(tiny_recipe(workspace, f"out={out}", *OPTIONS))
    return out


def copy_of(finished: Path, out: Path) -> Path:
    shutil.copytree(finished, out)
    return out


def recorded(out: Path) -> dict[int, tuple[str, str]]:
    """Loss and learning rate of every step, digit for digit."""
    steps = read_steps(Run.open(out).record_path)
    return {step: (repr(values["loss"]), repr(values["lr"])) for step, values in steps.items()}


@pytest.mark.parametrize("mode", ["constant", "rewarm", "as-planned"])
def test_an_extended_run_that_is_interrupted_equals_the_uninterrupted_one(
    mode: ExtendMode, finished: Path, workspace: Path, tmp_path: Path
) -> None:
    one, other = copy_of(finished, tmp_path / "one"), copy_of(finished, tmp_path / "other")
    train(tiny_recipe(workspace, f"out={one}", *OPTIONS, LONGER), extend=mode)
    recipe = tiny_recipe(workspace, f"out={other}", *OPTIONS, LONGER)
    with pytest.raises(Interrupted):
        train(recipe, hooks=ctrl_c_at(6), extend=mode)
    with pytest.raises(Interrupted):
        train(recipe, hooks=ctrl_c_at(7), extend=mode)  # the same command
    with pytest.raises(Interrupted):
        train(recipe, hooks=ctrl_c_at(8))  # without the option
    train(load_recipe(other / "run"))  # and by the directory
    assert recorded(one) == recorded(other)
    run = Run.open(other)
    expected = weights(Run.open(one))
    for name, tensor in weights(run).items():
        assert torch.equal(tensor, expected[name]), name
    [entry] = run.recipe.train.extensions
    assert (entry.step, entry.mode, entry.steps) == (6, mode, 6)
    rates = {step: values["lr"] for step, values in read_steps(run.record_path).items()}
    assert rates == {step: 5e-3 * run.plan().stage_of(step).lr_multiplier(step) for step in range(10)}
    assert recorded(one)[5] == recorded(finished)[5]
    if mode == "constant":
        assert {rates[step] for step in range(5, 10)} == {5e-4}


def test_a_rollback_by_hand_gives_the_same_learning_rates_again(
    finished: Path, workspace: Path, tmp_path: Path
) -> None:
    out = copy_of(finished, tmp_path / "out")
    recipe = tiny_recipe(workspace, f"out={out}", *OPTIONS, LONGER)
    train(recipe, extend="rewarm")
    before = recorded(out)
    for step in (10, 8, 6):  # z2a ckpt rm
        shutil.rmtree(Run.open(out).checkpoints.path(step))
    assert train(recipe, extend="rewarm").resumed_at == 4
    assert recorded(out) == before


def test_a_refused_choice_leaves_the_run_as_it_was(finished: Path, workspace: Path, tmp_path: Path) -> None:
    out = copy_of(finished, tmp_path / "out")
    before = {path: path.read_bytes() for path in (out / "run").iterdir() if path.is_file()}
    with pytest.raises(ScheduleChangedError, match=r"5\.00e-04 at step 5, the last one trained"):
        train(tiny_recipe(workspace, f"out={out}", *OPTIONS, LONGER))
    with pytest.raises(UsageError, match="past the 4 asked for"):
        train(tiny_recipe(workspace, f"out={out}", "train.steps=4"))
    with pytest.raises(UsageError, match="seed=11, not 12"):
        train(tiny_recipe(workspace, f"out={out}", *OPTIONS, LONGER, "seed=12"))
    assert {path: path.read_bytes() for path in (out / "run").iterdir() if path.is_file()} == before


def test_a_run_without_its_stored_recipe_resumes_as_planned_and_says_so(
    finished: Path, workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = copy_of(finished, tmp_path / "out")
    recipe = tiny_recipe(workspace, f"out={out}", *OPTIONS, LONGER)
    for damage in (Path.unlink, lambda path: path.write_text("train: [", encoding="utf-8")):
        damage(out / "run" / "recipe.yaml")
        with pytest.raises(UsageError, match="--extend constant needs the learning rate of the last start"):
            train(recipe, extend="constant")
        (out / "run" / "recipe.yaml").touch()
    (out / "run" / "recipe.yaml").write_text(recipe_yaml(tiny_recipe(workspace, "train.steps=3")), encoding="utf-8")
    assert train(recipe).steps == 10  # what is stored cannot have trained six steps
    assert "may differ from the last start's, which is unknown" in capsys.readouterr().err


def test_the_command_line_prints_the_command_to_choose_with(
    finished: Path, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = copy_of(finished, tmp_path / "out")
    recipe = tmp_path / "my recipe.yaml"
    recipe.write_text(recipe_yaml(tiny_recipe(workspace, f"out={out}", *OPTIONS)), encoding="utf-8")
    words = ["train", str(recipe), LONGER]
    monkeypatch.setattr(sys, "argv", ["z2a", *words])
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    # A second warm-up of three steps would take most of the four that are left.
    assert "Only 4 steps are left: a shorter warm-up leaves more of them to decay" in refused.stderr
    assert f"for example: z2a train '{recipe}' {LONGER} --extend constant" in refused.stderr
    done = CliRunner().invoke(app, [*words, "train.optimizer.lr=1e-3", "--extend", "constant"])
    assert done.exit_code == 0, done.output
    assert "train.optimizer.lr is 0.001, before 0.005: 5.00e-04 at step 5, 1.00e-04 at step 6" in done.stderr
    assert "▒ trained, █ planned from step 6" in done.stderr
    again = CliRunner().invoke(app, ["train", str(out), "--json"])
    assert '"resumed_at": 10' in again.stdout, again.output


def test_the_plot_shows_what_was_trained_and_what_is_planned(workspace: Path) -> None:
    recipe = tiny_recipe(workspace, "train.steps=40", "train.schedule={shape: constant, warmup: 0}")
    plan = Plan(recipe, TokenStore(recipe.tokens_dir, "train"))
    history = LRHistory(10, np.arange(10.0), np.linspace(2e-3, 1e-3, 10))
    *rows, axis = lr_plot(plan, 1e-3, history)
    assert len(rows) == 3
    bars = [row[12:].ljust(40) for row in rows]
    assert rows[0].startswith("lr 2.0e-03")  # the history was higher than the plan
    assert bars[0] == "▒" * 4 + " " * 36
    assert bars[1:] == ["▒" * 10 + "▄" * 30, "▒" * 10 + "█" * 30]
    assert axis.strip() == "└ step 0 to 40: ▒ trained, █ planned from step 10"
    assert lr_plot(plan, 1e-3)[-1].strip() == "└ step 0 to 40"


def resumed_on_a_rank(recipe: Recipe) -> tuple[str, list[float]]:
    """On one rank: the refusal, and the learning rates with a choice. Only rank 0 can read the stored recipe."""
    if dist.get_rank() > 0:
        del Run.stored_recipe
    with pytest.raises(ScheduleChangedError) as refused:
        train(recipe)
    multipliers: list[float] = []

    def remember(batch: Batch) -> None:
        multipliers.append(batch.stage.lr_multiplier(batch.step))

    train(recipe, TrainerHooks(on_batch=remember), extend="rewarm")
    return str(refused.value), multipliers


@pytest.mark.long
def test_all_ranks_agree(finished: Path, workspace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workspace, f"out={copy_of(finished, tmp_path / 'out')}", *OPTIONS, LONGER)
    one, other = run_ranks(2, resumed_on_a_rank, recipe, seconds=240)
    assert one == other
    refusal, multipliers = one
    assert "--extend rewarm" in refusal
    assert multipliers == pytest.approx([0.4, 0.7, 1.0, 1.0])  # from 0.1 over three steps


# Imported by the rank as the module of a sink: the rank is killed once, after step 8.
KILL_ONCE = """
import os, signal
from zero2all.train import Trainer

after_step = Trainer._after_step


def kill_once(self, batch, *words):
    after_step(self, batch, *words)
    mark = self.job.run.directory / "killed"
    if batch.step == 8 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


Trainer._after_step = kill_once


class NoSink:
    def __init__(self, directory): ...
    def step(self, step, values): ...
    def event(self, name, details): ...
    def sample(self, step, name, text): ...
    def histogram(self, step, name, counts, edges): ...
    def close(self): ...
"""


@pytest.mark.long
def test_an_elastic_restart_with_the_same_command_does_not_extend_again(
    finished: Path, workspace: Path, tmp_path: Path
) -> None:
    one, other = copy_of(finished, tmp_path / "one"), copy_of(finished, tmp_path / "other")
    longer = "train.steps=12"
    train(tiny_recipe(workspace, f"out={one}", *OPTIONS, longer), extend="rewarm")
    (tmp_path / "kill_once.py").write_text(KILL_ONCE, encoding="utf-8")
    recipe = tmp_path / "recipe.yaml"
    killing = "track.sinks=[kill_once:NoSink]"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    recipe.write_text(recipe_yaml(tiny_recipe(workspace, f"out={other}", *OPTIONS)), encoding="utf-8")
    command = ["launch", "--nproc-per-node", "1", "--", "train", str(recipe), longer, killing, "--extend", "rewarm"]
    done = subprocess.run(
        [sys.executable, "-m", "zero2all.cli", *command], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert (other / "run" / "killed").exists()
    assert done.stderr.count("resuming after step") == 2
    assert recorded(one) == recorded(other)
