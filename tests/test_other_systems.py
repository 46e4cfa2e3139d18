"""One process, as on a Mac: without /proc and /dev/shm, without what only Linux has, with another sys.platform.

And training on a GPU that lacks what the GPU of a Mac lacks. What is simulated is in ``tests/other_system``; a real Mac
is only in the workflow of the hosting site.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_recipe
from tests.test_quickstart import TINY
from zero2all.evals import evaluate_bpb
from zero2all.recipe import recipe_yaml
from zero2all.train import train

HERE = Path(__file__).parent
SIMULATION = HERE / "other_system"
RUN_COMMANDS = str(SIMULATION / "run_commands.py")
UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--user", "--map-root-user"]
LIBRARIES = "torch numba uvicorn starlette"
NO_MEMORY = "no in-memory checkpoints: this system has no /dev/shm"


def run_python(arguments: list[str], *before: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path]), **variables}
    command = [*before, sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)


def without_linux(
    directory: Path, arguments: list[str], libraries: str = LIBRARIES
) -> subprocess.CompletedProcess[str]:
    """Run Python on the simulated system. ``libraries`` are those that must be loaded on the real one."""
    (directory / "dev").mkdir(parents=True, exist_ok=True)
    return run_python(
        arguments,
        *(*UNSHARE, "sh", str(SIMULATION / "hide_linux.sh"), str(directory / "dev")),
        PYTHONPATH=os.pathsep.join([str(SIMULATION), str(HERE.parent), *sys.path]),
        TEST_LIBRARIES=libraries,
        # torch reads it from /proc/cpuinfo; other kernels would round in other ways.
        ATEN_CPU_CAPABILITY=torch.backends.cpu.get_cpu_capability().lower(),
    )


def results(done: subprocess.CompletedProcess[str]) -> tuple[list[int], str]:
    """Of ``run_commands.py``: the exit status of each z2a command, and all that was printed."""
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert "Traceback" not in printed, printed
    statuses = [line for line in done.stderr.splitlines() if line.startswith("exit status ")]
    return [int(line.removeprefix("exit status ")) for line in statuses], printed


@pytest.fixture(scope="module")
def mount_namespaces(tmp_path_factory: pytest.TempPathFactory) -> None:
    probe = without_linux(tmp_path_factory.mktemp("probe"), ["-c", ""])
    if probe.returncode:
        pytest.skip(f"no mount namespace can be made here: {probe.stderr.strip()}")


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "record.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line and "event" not in line}


@pytest.mark.long
@pytest.mark.usefixtures("mount_namespaces")
def test_a_run_without_linux_has_the_same_losses_after_a_stop(workspace: Path, tmp_path: Path) -> None:
    options = ["evals.every=6 steps", "checkpoint.flash_every=2 steps"]
    train(tiny_recipe(workspace, f"out={tmp_path}/linux", *options))
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "other"
    recipe.write_text(recipe_yaml(tiny_recipe(workspace, f"out={out}", *options)), encoding="utf-8")
    commands = [
        ["recipe", "check", str(recipe)],
        ["at step 5", "train", str(recipe)],
        ["train", str(recipe)],
        ["ckpt", "ls", str(out)],
        ["eval", "loss", str(out)],
        ["chat", str(out), "--prompt", "the model", "max_tokens=4"],
        ["export", str(out), "--to", f"{out}/hf"],
        ["watch", str(out), "--html", f"{out}/report.html"],
        ["launch", "--procs", "2", "--", "train", str(recipe)],
    ]
    statuses, printed = results(without_linux(tmp_path, [RUN_COMMANDS, json.dumps(commands)]))
    assert statuses == [0, 1, 0, 0, 0, 0, 0, 0, 2], printed
    assert losses(out / "run") == losses(tmp_path / "linux" / "run")
    assert "stopped after step 6 of 12" in printed
    assert "resuming after step 6" in printed
    assert printed.count(NO_MEMORY) == 2, "once in each process that trains"
    assert "'z2a launch' runs on Linux only, and this is darwin" in printed
    watch = [str(HERE / "interrupted.py"), sys.executable, "-m", "zero2all.cli", "watch", str(out)]
    page = without_linux(tmp_path, watch, libraries="uvicorn starlette")
    assert page.returncode == 0, page.stdout
    assert "http://127.0.0.1:" in page.stdout


@pytest.mark.long
@pytest.mark.usefixtures("mount_namespaces")
def test_the_quickstart_and_the_checks_run_without_linux(workspace: Path, tmp_path: Path) -> None:
    """/dev/shm also holds the semaphores of worker processes: without them one process does the work."""
    raw, first = workspace / "raw", tmp_path / "first"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_yaml(tiny_recipe(workspace, f"out={tmp_path}", "corpus.dir=null")), encoding="utf-8")
    commands = [
        ["doctor", "--dir", str(tmp_path)],
        ["quickstart", "--out", str(first), "--corpus", str(raw / "zh"), *TINY[:-1], "corpus.filters=[]"],
        ["watch", str(first), "--once"],
        ["corpus", "build", str(recipe), "--workers", "2"],
        ["launch", "--rendezvous-only"],
    ]
    statuses, printed = results(without_linux(tmp_path, [RUN_COMMANDS, json.dumps(commands)]))
    assert statuses == [0, 0, 0, 0, 2], printed
    assert printed.count(NO_MEMORY) == 1
    assert printed.count("no worker processes") == 1


# Together: what computes in another way off the CPU, or in half precision inside.
OFF_CPU = ["train.document_mask=true", "train.optimizer.name=muon", "evals.every=2 steps", "track.layer_norms_every=2"]
MOE = "model.moe={num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32}"


def train_twice(workspace: Path, tmp_path: Path, *overrides: str) -> str:
    """On the CPU, and on the simulated GPU with a stop: the losses are the same up to rounding. What was printed."""
    options = ["train.steps=4", *overrides]
    train(tiny_recipe(workspace, f"out={tmp_path}/cpu", *options), evaluate=evaluate_bpb)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_yaml(tiny_recipe(workspace, f"out={tmp_path}/gpu", *options)), encoding="utf-8")
    commands = [["at step 1", "train", str(recipe)], ["train", str(recipe)]]
    statuses, printed = results(run_python([RUN_COMMANDS, json.dumps(commands)], TEST_SIMULATED_GPU="1"))
    assert statuses == [1, 0], printed
    assert "parameters on simulated" in printed
    assert "resuming after step 2" in printed
    assert "no samples" not in printed
    assert losses(tmp_path / "gpu" / "run") == pytest.approx(losses(tmp_path / "cpu" / "run"), rel=1e-5)
    return printed


@pytest.mark.long
def test_training_uses_nothing_that_the_gpu_of_a_mac_lacks(workspace: Path, tmp_path: Path) -> None:
    train_twice(workspace, tmp_path, *OFF_CPU)


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [
        ["train.optimizer.name=lion"],
        ["train.optimizer.name=adafactor"],
        [MOE],
        ["model.sliding_window=8"],
        ["parallel.activation_checkpointing=full"],
    ],
    ids=["lion", "adafactor", "moe", "window", "recompute"],
)
def test_training_with_other_options_too(workspace: Path, tmp_path: Path, overrides: list[str]) -> None:
    train_twice(workspace, tmp_path, *overrides)
