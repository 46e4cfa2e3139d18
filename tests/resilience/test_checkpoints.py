"""Durable checkpoints: written in the background, here or in an object store, kept by rule, shown on request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tests.conftest import tiny_recipe
from tests.resilience.helpers import CrashError, crash_at, crashed, losses
from zero2all.cli.main import app
from zero2all.errors import UsageError, Z2aError
from zero2all.evals import bits_per_byte
from zero2all.recipe import Recipe
from zero2all.resilience import Checkpoints, Keeper, Team, locked
from zero2all.resilience.inspect import differences, kept_states
from zero2all.train import Run, train


def z2a(*words: object) -> tuple[int, dict[str, object]]:
    done = CliRunner().invoke(app, ["ckpt", *map(str, words), "--json"])

    return done.exit_code, json.loads(done.stdout)


def a_keeper(directory: Path, memory: Path | None = None, **keep: int) -> tuple[Keeper, nn.Linear]:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return Keeper(Checkpoints(directory, **keep), memory, directory, model, [optimizer], Team()), model


def test_the_newest_the_best_and_the_permanent_are_kept(tmp_path: Path) -> None:
    keeper, _ = a_keeper(tmp_path, keep=2, keep_best=1)
    quality = {1: 3.0, 2: 1.5, 3: 2.0, 5: 1.9}
    for step in range(1, 8):
        keeper.save(step, {"permanent": step % 3 == 0, "bits_per_byte": quality.get(step)}, durable=True)
    keeper.wait()
    assert keeper.checkpoints.steps() == [2, 3, 6, 7]
    assert keeper.checkpoints.best()[0] == 2


def test_a_damaged_checkpoint_of_a_later_step_pushes_none_out(tmp_path: Path) -> None:
    keeper, _ = a_keeper(tmp_path, keep=1)
    (tmp_path / "step-00000012").mkdir()
    keeper.save(8, {}, durable=True)
    keeper.wait()
    assert keeper.checkpoints.newest() == 8


def test_a_rollback_to_a_state_in_memory_leaves_a_durable_one(tmp_path: Path) -> None:
    keeper, _ = a_keeper(tmp_path / "run", tmp_path / "memory", keep=1)
    for step, durable in ((10, True), (15, False), (20, True)):
        keeper.save(step, {"step": step}, durable)
        keeper.wait()
    assert keeper.checkpoints.steps() == [20]
    found = keeper.roll_back(18)
    assert found is not None
    assert (found.step, found.where) == (15, "in memory")
    assert keeper.checkpoints.steps() == [15]
    assert keeper.checkpoints.problem(15) is None
    keeper.close("finished")


def test_a_damaged_note_of_an_old_checkpoint_harms_nobody(tmp_path: Path) -> None:
    keeper, _ = a_keeper(tmp_path, keep=1)
    keeper.save(10, {}, durable=True)
    keeper.wait()
    state = keeper.checkpoints.path(10) / "state.json"
    state.write_bytes(b"\xff" + state.read_bytes()[1:])
    (keeper.checkpoints.path(10) / "manifest.json").write_text("{", encoding="utf-8")
    assert [(row["step"], row["whole"]) for row in kept_states(keeper.checkpoints, None)] == [(10, False)]
    keeper.save(20, {}, durable=True)
    keeper.settle()
    assert keeper.checkpoints.steps() == [20]


def test_what_is_written_is_the_state_that_was_staged(tmp_path: Path) -> None:
    """Weights that move while they are being written do not get into the checkpoint."""
    keeper, model = a_keeper(tmp_path)
    expected = model.weight.detach().clone()
    keeper.save(1, {}, durable=True)
    with torch.no_grad():
        model.weight.fill_(9.0)
    keeper.wait()
    found = nn.Linear(8, 8)
    keeper.checkpoints.load_model(1, found)
    assert torch.equal(found.weight, expected)


class Quantised(torch.Tensor):
    """A tensor that is more than its bytes, as those of 8-bit optimizers are."""


def test_state_that_is_no_plain_bytes_is_written_while_training_waits(tmp_path: Path) -> None:
    keeper, model = a_keeper(tmp_path)
    moments = keeper.optimizers[0].state[model.weight]
    moments["exp_avg"] = moments["exp_avg"].as_subclass(Quantised)
    keeper.save(1, {}, durable=False)
    keeper.save(2, {}, durable=True)
    assert keeper.checkpoints.steps() == [2]
    found = nn.Linear(8, 8)
    keeper.checkpoints.load_model(2, found)
    assert torch.equal(found.weight, model.weight)


def test_a_disk_that_fails_costs_a_checkpoint_and_not_the_run(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    places = [f"out={tmp_path}/out", f"checkpoint.dir={tmp_path}/file/checkpoints"]
    memory = ["checkpoint.flash_every=3 steps", f"checkpoint.flash_dir={tmp_path}/memory"]
    recipe = tiny_recipe(world, *places, *memory)
    with pytest.raises(Z2aError, match="the last checkpoint could not be written"):
        train(recipe)
    assert "a checkpoint could not be written" in capsys.readouterr().err
    (tmp_path / "file").unlink()
    assert train(recipe)["resumed_at"] == 12  # from memory; nothing was computed again
    assert Run.open(recipe.run_dir).checkpoints.newest() == 12
    assert list(losses(Run.open(recipe.run_dir))) == list(range(12))


@pytest.mark.slow
def test_checkpoints_in_an_object_store(world: Path, tmp_path: Path, s3: str) -> None:
    train(tiny_recipe(world, f"out={tmp_path}/whole"))
    recipe = tiny_recipe(world, f"out={tmp_path}/out", f"checkpoint.dir={s3}/run")
    crashed(recipe, 9)
    run = Run.open(recipe.run_dir)
    assert run.checkpoints.steps() == [4, 8]
    assert z2a("verify", run.directory)[0] == 0
    assert {row["where"] for row in z2a("ls", run.directory)[1]["states"]} == {"durable"}
    state = run.checkpoints.path(8) / "state.json"
    (tmp_path / "other").write_text(state.read_text().replace("8", "9"))
    state.put(tmp_path / "other")
    code, answer = z2a("verify", run.directory)
    assert code == 1
    assert "state.json does not match its checksum" in str(answer["error"])
    assert train(recipe)["resumed_at"] == 4
    assert losses(run) == losses(tmp_path / "whole")
    run.load_model()


def test_two_trainers_in_one_run_are_refused_and_a_dead_one_is_not(world: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(world, f"out={tmp_path}")
    code = "import sys, time; from zero2all.resilience import locked; from pathlib import Path\n"
    code += "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(recipe.run_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        refused = pytest.raises(UsageError, match=f"another trainer works in .* \\(process {holder.pid} on ")
        with refused, locked(recipe.run_dir, patience=0.2):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        with locked(recipe.run_dir, patience=0.2):
            pass
    finally:
        holder.kill()
        holder.wait()


@pytest.fixture(scope="module")
def kept(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Run]:
    out = tmp_path_factory.mktemp("kept")
    memory = ["checkpoint.flash_every=5 steps", f"checkpoint.flash_dir={out}/memory"]
    recipe = tiny_recipe(world, f"out={out}", "evals.every=4 steps", "checkpoint.keep_best=1", *memory)
    with suppress(CrashError):
        train(recipe, evaluate=bits_per_byte, on_batch=crash_at(11))
    return recipe, Run.open(recipe.run_dir)


def test_ls_shows_what_is_kept(kept: tuple[Recipe, Run]) -> None:
    _, run = kept
    code, answer = z2a("ls", run.directory)
    assert code == 0
    states = answer["states"]
    assert [(row["step"], row["where"], row["whole"]) for row in states] == [
        (4, "durable", True), (8, "durable", True), (8, "memory", True), (10, "memory", True),
    ]  # fmt: skip
    assert all(row["bytes"] > 1000 and row["time"] for row in states)
    assert "best" in states[1]["notes"]


def test_diff_names_the_parameters_that_moved(kept: tuple[Recipe, Run]) -> None:
    _, run = kept
    code, answer = z2a("diff", run.directory, 4, 8)
    assert code == 0
    one, other = (run.load_model(step).state_dict() for step in (4, 8))
    assert {row["parameter"] for row in answer["parameters"]} == set(one)
    for row in answer["parameters"]:
        expected = (one[row["parameter"]].double() - other[row["parameter"]].double()).abs().max().item()
        assert row["largest"] == pytest.approx(expected)
    relative = [row["relative"] for row in answer["parameters"]]
    assert relative == sorted(relative, reverse=True)
    assert z2a("diff", run.directory, 8, 8)[1]["parameters"][0]["largest"] == 0


def test_diff_with_a_step_that_is_not_there_says_which_are(kept: tuple[Recipe, Run]) -> None:
    with pytest.raises(UsageError, match=r"no checkpoint of step 5 in .*; steps there: 4, 8"):
        differences(kept[1].checkpoints, 4, 5)


def test_verify_names_the_damaged_file_and_rm_spares_the_last_whole_one(kept: tuple[Recipe, Run]) -> None:
    _, run = kept
    assert z2a("verify", run.directory)[0] == 0
    shard = next(run.checkpoints.path(8).glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[100] ^= 16
    shard.write_bytes(data)
    code, answer = z2a("verify", run.directory)
    assert code == 1
    assert f"{run.checkpoints.path(8)}: {shard.name} does not match its checksum" in str(answer["error"])
    assert z2a("verify", run.directory, "--step", 4)[0] == 0
    assert z2a("rm", run.directory, "--step", 4)[0] == 2
    assert z2a("rm", run.directory, "--step", 5)[0] == 2
    assert z2a("rm", run.directory, "--step", 8)[0] == 0
    assert z2a("rm", run.directory, "--step", 4, "--force")[0] == 0
    assert run.checkpoints.steps() == []
