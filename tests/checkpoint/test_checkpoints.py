"""Durable checkpoints: background writes, object stores, retention and ``z2a ckpt``."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tests.checkpoint.helpers import TRAINING_STATE, CrashError, crash_at, crashed, flip_a_bit, losses, save
from tests.conftest import tiny_recipe
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.records import parse_record
from zero2all.checkpoint import (
    CheckpointedModel,
    CheckpointManager,
    CheckpointPlaces,
    CheckpointStore,
    RankGroup,
)
from zero2all.checkpoint.checkpoint_directory import CheckpointHeader
from zero2all.checkpoint.inspection import compare_checkpoints, list_checkpoints
from zero2all.cli.main import app
from zero2all.evals import evaluate_bpb
from zero2all.recipe import Recipe
from zero2all.train import Run, Trainer, TrainerHooks, train


def z2a(*words: object) -> tuple[int, dict[str, object]]:
    done = CliRunner().invoke(app, ["ckpt", *map(str, words), "--json"])

    return done.exit_code, json.loads(done.stdout)


def make_manager(directory: Path, memory: Path | None = None, **keep: int) -> tuple[CheckpointManager, nn.Linear]:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    places = CheckpointPlaces(CheckpointStore(directory, **keep), directory, memory)
    return CheckpointManager(places, CheckpointedModel(model, [optimizer]), RankGroup()), model


def test_the_newest_the_best_and_the_permanent_are_kept(tmp_path: Path) -> None:
    manager, _ = make_manager(tmp_path, keep=2, keep_best=1)
    quality = {1: 3.0, 2: 1.5, 3: 2.0, 5: 1.9}
    for step in range(1, 8):
        state = replace(TRAINING_STATE, permanent=step % 3 == 0, bits_per_byte=quality.get(step))
        manager.save(step, state, durable=True)
    manager.wait_until_saved()
    assert manager.checkpoints.steps() == [2, 3, 6, 7]
    assert manager.checkpoints.best_steps()[0] == 2


def test_a_damaged_checkpoint_of_a_later_step_displaces_no_valid_one(tmp_path: Path) -> None:
    manager, _ = make_manager(tmp_path, keep=1)
    (tmp_path / "step-00000012").mkdir()
    save(manager, 8, durable=True)
    assert manager.checkpoints.newest_valid() == 8


def test_a_rollback_to_a_state_in_memory_leaves_a_durable_one(tmp_path: Path) -> None:
    manager, _ = make_manager(tmp_path / "run", tmp_path / "memory", keep=1)
    for step, durable in ((10, True), (15, False), (20, True)):
        save(manager, step, durable=durable)
    assert manager.checkpoints.steps() == [20]
    found = manager.roll_back(18)
    assert (found.step, found.location) == (15, "in memory")
    assert manager.checkpoints.steps() == [15]
    assert manager.checkpoints.problem(15) is None
    manager.close("finished")


def test_a_damaged_state_of_an_old_checkpoint_does_no_harm(tmp_path: Path) -> None:
    manager, _ = make_manager(tmp_path, keep=1)
    save(manager, 10, durable=True)
    state = manager.checkpoints.path(10) / "state.json"
    state.write_bytes(b"\xff" + state.read_bytes()[1:])
    (manager.checkpoints.path(10) / "manifest.json").write_text("{", encoding="utf-8")
    assert [(row.step, row.whole) for row in list_checkpoints(manager.checkpoints, None)] == [(10, False)]
    manager.save(20, TRAINING_STATE, durable=True)
    manager.finish_pending_write()
    assert manager.checkpoints.steps() == [20]


def test_what_is_written_is_the_state_that_was_staged(tmp_path: Path) -> None:
    """Weights updated during the write do not get into the checkpoint."""
    manager, model = make_manager(tmp_path)
    expected = model.weight.detach().clone()
    manager.save(1, TRAINING_STATE, durable=True)
    with torch.no_grad():
        model.weight.fill_(9.0)
    manager.wait_until_saved()
    found = nn.Linear(8, 8)
    manager.checkpoints.load_model(1, found)
    assert torch.equal(found.weight, expected)


class Quantized(torch.Tensor):
    """A tensor subclass, as 8-bit optimizers use."""


def test_state_that_is_not_plain_bytes_is_written_while_training_waits(tmp_path: Path) -> None:
    manager, model = make_manager(tmp_path)
    moments = manager.trained.optimizers[0].state[model.weight]
    moments["exp_avg"] = moments["exp_avg"].as_subclass(Quantized)
    manager.save(1, TRAINING_STATE, durable=False)
    manager.save(2, TRAINING_STATE, durable=True)
    assert manager.checkpoints.steps() == [2]
    found = nn.Linear(8, 8)
    manager.checkpoints.load_model(2, found)
    assert torch.equal(found.weight, model.weight)


def test_a_disk_that_fails_costs_a_checkpoint_and_not_the_run(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    places = [f"out={tmp_path}/out", f"checkpoint.dir={tmp_path}/file/checkpoints"]
    memory = ["checkpoint.flash_every=3 steps", f"checkpoint.flash_dir={tmp_path}/memory"]
    recipe = tiny_recipe(workspace, *places, *memory)
    with pytest.raises(Z2aError, match="the last checkpoint could not be written"):
        train(recipe)
    assert "a checkpoint could not be written" in capsys.readouterr().err
    (tmp_path / "file").unlink()
    assert train(recipe).resumed_at == 12  # from memory; no step was repeated
    assert Run.open(recipe.run_dir).checkpoints.newest_valid() == 12
    assert list(losses(Run.open(recipe.run_dir))) == list(range(12))


@pytest.mark.slow
def test_checkpoints_in_an_object_store(workspace: Path, tmp_path: Path, s3: str) -> None:
    train(tiny_recipe(workspace, f"out={tmp_path}/uninterrupted"))
    recipe = tiny_recipe(workspace, f"out={tmp_path}/out", f"checkpoint.dir={s3}/run")
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
    assert train(recipe).resumed_at == 4
    assert losses(run) == losses(tmp_path / "uninterrupted")
    expected = run.load_model().state_dict()
    with Trainer(tiny_recipe(workspace, f"out={tmp_path}/next", f"train.init={s3}/run/step-00000012")) as trainer:
        assert all(torch.equal(weight, expected[name]) for name, weight in trainer.job.model.model.state_dict().items())


@pytest.fixture(scope="module")
def kept(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Run]:
    out = tmp_path_factory.mktemp("kept")
    memory = ["checkpoint.flash_every=5 steps", f"checkpoint.flash_dir={out}/memory"]
    recipe = tiny_recipe(workspace, f"out={out}", "evals.every=4 steps", "checkpoint.keep_best=1", *memory)
    with suppress(CrashError):
        train(recipe, evaluate=evaluate_bpb, hooks=TrainerHooks(on_batch=crash_at(11)))
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


def test_diff_names_the_parameters_that_changed(kept: tuple[Recipe, Run]) -> None:
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


def test_diff_with_a_missing_step_lists_the_available_ones(kept: tuple[Recipe, Run]) -> None:
    with pytest.raises(UsageError, match=r"no checkpoint of step 5 in .*; steps there: 4, 8"):
        compare_checkpoints(kept[1].checkpoints, 4, 5)


def test_verify_names_the_damaged_file_and_rm_spares_the_last_valid_one(kept: tuple[Recipe, Run]) -> None:
    _, run = kept
    assert z2a("verify", run.directory)[0] == 0
    shard = next(run.checkpoints.path(8).glob("*.distcp"))
    flip_a_bit(shard)
    code, answer = z2a("verify", run.directory)
    assert code == 1
    assert f"{run.checkpoints.path(8)}: {shard.name} does not match its checksum" in str(answer["error"])
    assert z2a("verify", run.directory, 4)[0] == 0
    assert z2a("rm", run.directory, 4)[0] == 2
    assert z2a("rm", run.directory, 5)[0] == 2
    assert z2a("rm", run.directory, 8)[0] == 0
    assert z2a("rm", run.directory, 4, "--force")[0] == 0
    assert run.checkpoints.steps() == []


def test_a_header_needs_no_key_and_ignores_unknown_ones() -> None:
    assert parse_record(CheckpointHeader, {"step": 1, "new": {}}, "state.json") == CheckpointHeader()
    with pytest.raises(Z2aError, match="lineage"):
        parse_record(CheckpointHeader, {"lineage": []}, "state.json")
