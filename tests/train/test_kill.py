"""SIGKILL at a random step costs nothing but the steps since the last checkpoint."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_recipe
from tests.processes import run_preloaded
from zero2all.recipe import recipe_yaml
from zero2all.track import read_steps
from zero2all.train import Run, train

STEPS = 60
EVERY = 7
# A trainer that is killed at the start of a given step, once the checkpoint before it is written: no race between the
# test, the trainer and the thread that writes.
TRAINER = """
import os, signal, sys, time
import torch
from zero2all.recipe import load_recipe
from zero2all.train import Run, TrainerHooks, train

torch.set_num_threads(1)  # another partition of a sum may round differently
recipe, kill_at, every = load_recipe(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
checkpoints = Run(recipe, recipe.run_dir).checkpoints

def kill(batch):
    if batch.step == kill_at:
        due, deadline = kill_at // every * every, time.monotonic() + 60
        while due and not checkpoints.is_valid(due) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

train(recipe, hooks=TrainerHooks(on_batch=kill))
"""


def run_trainer(recipe: Path, kill_at: int) -> tuple[int, list[str]]:
    """Exit status and the lines it printed."""
    done = run_preloaded(TRAINER, str(recipe), str(kill_at), str(EVERY))
    return done.returncode, done.stderr.splitlines()


@pytest.mark.slow
def test_sigkill_at_random_steps_and_resume_is_bitwise_the_uninterrupted_run(
    workspace: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    options = [f"train.steps={STEPS}", f"checkpoint.every={EVERY} steps", "track.log_every=1"]
    options += ["model.attention_dropout=0.1", "model.residual_dropout=0.1"]  # masks too
    uninterrupted = tiny_recipe(workspace, f"out={tmp_path}/uninterrupted", *options)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train(uninterrupted)
    finally:
        torch.set_num_threads(threads)

    killed = tiny_recipe(workspace, f"out={tmp_path}/killed", *options)
    recipe_file = tmp_path / "killed.yaml"
    recipe_file.write_text(recipe_yaml(killed))
    printed: list[str] = []
    rng = random.Random(2)
    # Once before there is a checkpoint, twice after, then to the end.
    for kill_at in (rng.randrange(1, EVERY), *sorted(rng.sample(range(EVERY + 1, STEPS), 2)), STEPS):
        status, lines = run_trainer(recipe_file, kill_at)
        assert status == (0 if kill_at == STEPS else -signal.SIGKILL), lines
        printed += lines
    assert sum("resuming after step" in line for line in printed) == 2
    record_property("cases", 3)

    one, other = Run.open(uninterrupted.run_dir), Run.open(killed.run_dir)
    expected = {step: repr(values["loss"]) for step, values in read_steps(one.record_path).items()}
    assert len(expected) == STEPS
    assert {step: repr(values["loss"]) for step, values in read_steps(other.record_path).items()} == expected
    # The log lines agree, also for the steps that were repeated.
    for line in printed:
        if line.startswith("step "):
            step = int(line.split()[1].split("/")[0]) - 1
            assert f"loss {float(expected[step]):.4f}" in line
    for name, tensor in one.load_model().state_dict().items():
        assert torch.equal(tensor, other.load_model().state_dict()[name]), name
