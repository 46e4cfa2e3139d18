"""The promise of the walking skeleton: SIGKILL at a random step costs nothing but the steps since the checkpoint."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_recipe
from zero2all.recipe import recipe_yaml
from zero2all.track import read_steps
from zero2all.train import Run, train

STEPS = 60
Z2A = Path(sys.executable).with_name("z2a")


def start(recipe: Path) -> subprocess.Popen[bytes]:
    # The threads are fixed because a sum over other pieces may round otherwise.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([Z2A, "train", recipe], env=environment, stderr=subprocess.PIPE)


def steps_written(record: Path) -> int:
    return record.read_bytes().count(b'"loss"') if record.exists() else 0


@pytest.mark.slow
def test_sigkill_at_random_steps_and_resume_is_bitwise_the_undisturbed_run(world: Path, tmp_path: Path) -> None:
    options = [f"train.steps={STEPS}", "checkpoint.every=7 steps", "track.print_every=1"]
    whole = tiny_recipe(world, f"out={tmp_path}/whole", *options)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train(whole)
    finally:
        torch.set_num_threads(threads)

    killed = tiny_recipe(world, f"out={tmp_path}/killed", *options)
    recipe_file = tmp_path / "killed.yaml"
    recipe_file.write_text(recipe_yaml(killed))
    record = killed.run_dir / "record.jsonl"
    printed: list[str] = []
    rng = random.Random(2)
    # Once before there is a checkpoint, twice after.
    for kill_after in (rng.randrange(1, 6), *sorted(rng.sample(range(8, STEPS - 8), 2))):
        process = start(recipe_file)
        deadline = time.monotonic() + 120
        already = steps_written(record)
        while steps_written(record) == already or max(read_steps(record), default=0) < kill_after:
            assert process.poll() is None, process.stderr.read().decode()  # type: ignore[union-attr]
            assert time.monotonic() < deadline
            time.sleep(0.002)  # between two looks at the file; what decides is the step, not the time
        process.send_signal(signal.SIGKILL)
        printed += process.communicate()[1].decode().splitlines()
        assert process.returncode == -signal.SIGKILL
    process = start(recipe_file)
    printed += process.communicate(timeout=120)[1].decode().splitlines()
    assert process.returncode == 0, printed
    assert sum("resuming after step" in line for line in printed) == 2

    one, other = Run.open(whole.run_dir), Run.open(killed.run_dir)
    expected = {step: repr(values["loss"]) for step, values in read_steps(one.record_path).items()}
    assert len(expected) == STEPS
    assert {step: repr(values["loss"]) for step, values in read_steps(other.record_path).items()} == expected
    # What a person saw says the same, also for the steps that were done twice.
    for line in printed:
        if line.startswith("step "):
            step = int(line.split()[1].split("/")[0]) - 1
            assert f"loss {float(expected[step]):.6f}" in line
    for name, tensor in one.load_model().state_dict().items():
        assert torch.equal(tensor, other.load_model().state_dict()[name]), name
