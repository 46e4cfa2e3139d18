"""States in memory: a restart loses no more than the steps since the last of them, and never uses a damaged one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.helpers import TRAINING_STATE, crashed, flip_a_bit, losses, save, tiny_manager
from tests.conftest import tiny_recipe
from tests.processes import run_preloaded
from zero2all.base.errors import Interrupted
from zero2all.bench.rank_harness import run_ranks
from zero2all.checkpoint import slot_directories
from zero2all.checkpoint.slot_directories import claim_flash_directory, flash_directory
from zero2all.checkpoint.staged_slot import find_staged_slots
from zero2all.recipe import Recipe, recipe_yaml
from zero2all.train import Run, TrainerHooks, train

FLASH = ["checkpoint.flash_every=3 steps", "checkpoint.every=8 steps"]
# A trainer that is killed as it starts a given step, or as it is about to stage one. States are finished in the
# background: it dies with the one before its step, however slow the machine is.
TRAINER = """
import json, os, signal, sys, time
import torch
from zero2all.recipe import load_recipe
from zero2all.checkpoint import flash
from zero2all.train import TrainerHooks, train

def die(*_): os.kill(os.getpid(), signal.SIGKILL)

torch.set_num_threads(1)
where, when = sys.argv[2], int(sys.argv[3])
finish, begin = flash.Slot.finish, flash.Slot.begin

def half(self, step, *rest):
    begin(self, step, *rest)
    self.data[: len(self.data) // 2].fill_(7)
    if step == when: die()

if where == "before the marker":
    flash.Slot.finish = lambda self, *rest: die() if self.step == when else finish(self, *rest)
if where == "while copying":
    flash.Slot.begin = half

recipe = load_recipe(sys.argv[1])

def is_kept(step):
    markers = map(json.loads, (path.read_text() for path in recipe.checkpoint.flash_dir.rglob("slot-*.json")))
    return any(marker["step"] == step and marker.get("hash") for marker in markers)

def on_batch(batch):
    if where == "step" and batch.step == when:
        until = time.monotonic() + 60
        while not is_kept(when - 1) and time.monotonic() < until:
            time.sleep(0.01)
        die()

train(recipe, hooks=TrainerHooks(on_batch=on_batch))
"""


@pytest.fixture(scope="module")
def uninterrupted(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    recipe = tiny_recipe(workspace, f"out={tmp_path_factory.mktemp('uninterrupted')}")
    train(recipe)
    return Run.open(recipe.run_dir)


@pytest.fixture
def recipe(workspace: Path, tmp_path: Path) -> Recipe:
    return tiny_recipe(workspace, f"out={tmp_path}/out", f"checkpoint.flash_dir={tmp_path}/memory", *FLASH)


def memory(recipe: Recipe) -> Path:
    [directory] = recipe.checkpoint.flash_dir.glob("z2a-*")
    return directory


@pytest.mark.parametrize(("when", "kept"), [(2, 0), (5, 3), (8, 8), (10, 9)])
def test_a_restart_resumes_bit_for_bit_from_the_newest_state(
    when: int, kept: int, recipe: Recipe, uninterrupted: Run
) -> None:
    crashed(recipe, when)
    assert train(recipe).resumed_at == kept
    assert losses(Run.open(recipe.run_dir)) == losses(uninterrupted)
    assert not list(recipe.checkpoint.flash_dir.glob("z2a-*")), "a finished run leaves nothing in memory"


def test_a_second_crash_right_after_a_restart_loses_no_more(recipe: Recipe, uninterrupted: Run) -> None:
    for when, kept in ((7, 0), (7, 6), (10, 6), (10, 9)):
        assert resumed_at(recipe, when) == kept
    train(recipe)
    assert losses(Run.open(recipe.run_dir)) == losses(uninterrupted)


def resumed_at(recipe: Recipe, when: int) -> int:
    crashed(recipe, when)
    lines = [json.loads(line) for line in (recipe.run_dir / "record.jsonl").read_text().splitlines()]
    return [int(line["step"]) for line in lines if line.get("event") in ("start", "resume")][-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "when", "kept"), [("step", 7, 6), ("while copying", 6, 3), ("before the marker", 9, 8)]
)
def test_the_state_outlives_a_killed_process(
    where: str,
    when: int,
    kept: int,
    recipe: Recipe,
    uninterrupted: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(recipe))
    killed = run_preloaded(TRAINER, str(tmp_path / "recipe.yaml"), where, str(when))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert train(recipe).resumed_at == kept
    assert losses(Run.open(recipe.run_dir)) == losses(uninterrupted)
    if where != "step":
        assert f"the state of step {when} in memory" in " ".join(capsys.readouterr().err.split())


def committed_marker(recipe: Recipe, step: int) -> Path:
    """The marker of a state, once the thread that outlives the crash has written its checksum."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for path in memory(recipe).glob("*/slot-*.json"):
            header = json.loads(path.read_text())
            if header["step"] == step and "hash" in header:
                return path
        time.sleep(0.01)
    raise AssertionError(f"the state of step {step} was not committed")


DAMAGE: dict[str, Callable[[Path], object]] = {  # of the data, or of its marker
    "bit": flip_a_bit,
    "truncated": lambda data: os.truncate(data, data.stat().st_size - 4096),
    "missing": Path.unlink,
    "no marker": Path.unlink,
    "torn marker": lambda marker: marker.write_text('{"step": 6, "ti'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_is_skipped(
    damage: str, recipe: Recipe, uninterrupted: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    crashed(recipe, 7)  # slots of steps 3 and 6
    marker = committed_marker(recipe, 6)
    DAMAGE[damage](marker if "marker" in damage else marker.with_suffix(".bin"))
    assert train(recipe).resumed_at == 3
    if "marker" not in damage:
        assert "state of step 6 in memory" in " ".join(capsys.readouterr().err.split())
    assert losses(Run.open(recipe.run_dir)) == losses(uninterrupted)


def test_another_run_in_the_same_directory_never_restores_an_old_state(recipe: Recipe, uninterrupted: Run) -> None:
    crashed(recipe, 7)
    shutil.rmtree(recipe.run_dir)
    assert train(recipe).resumed_at == 0
    assert losses(Run.open(recipe.run_dir)) == losses(uninterrupted)


def test_without_space_in_memory_training_continues(
    recipe: Recipe, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    crashed(recipe, 10)
    assert "not enough space for two states" in capsys.readouterr().err
    assert train(recipe).resumed_at == 8
    assert losses(Run.open(recipe.run_dir)) == losses(uninterrupted)


def test_ctrl_c_leaves_a_durable_checkpoint(recipe: Recipe) -> None:
    with pytest.raises(Interrupted):
        train(
            recipe,
            hooks=TrainerHooks(on_batch=lambda batch: signal.raise_signal(signal.SIGINT) if batch.step == 4 else None),
        )
    assert Run.open(recipe.run_dir).checkpoints.newest_valid() == 5


def crash_on_ranks(recipe: Recipe, when: int) -> None:
    crashed(recipe, when)


def resume(recipe: Recipe) -> int:
    return int(train(recipe).resumed_at)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("layout", ["{dp_shard: 2}", "{dp_replicate: 2}", "{tp: 2}", "{pp: 2}"])
def test_several_ranks_agree_on_a_state_and_resume_bit_for_bit(layout: str, workspace: Path, tmp_path: Path) -> None:
    recipes = [
        tiny_recipe(
            workspace, f"out={tmp_path}/{name}", f"checkpoint.flash_dir={tmp_path}/memory", f"parallel={layout}", *FLASH
        )
        for name in ("uninterrupted", "crashed")
    ]
    run_ranks(2, resume, recipes[0])
    run_ranks(2, crash_on_ranks, recipes[1], 7)
    # One rank's state of step 6 is bad: both go back to step 3.
    [one, _] = sorted(memory(recipes[1]).glob("rank-0-of-2/slot-*.json"))
    bad = next(p for p in memory(recipes[1]).glob("rank-1-of-2/*.json") if '"step": 6' in p.read_text()[:20])
    bad.unlink()
    assert one.exists()
    assert run_ranks(2, resume, recipes[1]) == [3, 3]
    assert losses(tmp_path / "crashed") == losses(tmp_path / "uninterrupted")


@pytest.mark.slow
@pytest.mark.parametrize("before", ["{dp_shard: 2}", "{tp: 2}", "{pp: 2}"])
def test_another_world_size_reads_the_states_in_memory(
    before: str, workspace: Path, tmp_path: Path, uninterrupted: Run
) -> None:
    recipe = tiny_recipe(workspace, f"out={tmp_path}", f"checkpoint.flash_dir={tmp_path}/memory", *FLASH)
    parallel = type(recipe.parallel).model_validate(json.loads(before.replace("{", '{"').replace(":", '":')))
    run_ranks(2, crash_on_ranks, recipe.model_copy(update={"parallel": parallel}), 7)
    assert train(recipe).resumed_at == 6
    found, expected = losses(Run.open(tmp_path)), losses(uninterrupted)
    assert {step: float(loss) for step, loss in found.items()} == pytest.approx(
        {step: float(loss) for step, loss in expected.items()}, abs=1e-5
    )


def test_states_of_a_deleted_run_are_removed(tmp_path: Path) -> None:
    """Deleted, or replaced by another run; young states may be of a run that is just being moved."""
    place, old = tmp_path / "memory", time.time() - 2 * slot_directories.ABANDONED_AFTER
    keys = {"gone": None, "replaced": "another", "here": "here", "young": None}
    for name, key in keys.items():
        run = tmp_path / name
        if key is not None:
            run.mkdir()
            (run / "key").write_text(f"{key}\n", encoding="utf-8")
        directory = flash_directory(place, name)
        claim_flash_directory(directory, run)
        if name != "young":
            os.utime(directory / "run", (old, old))
    claim_flash_directory(flash_directory(place, "new"), tmp_path / "new")
    kept = {"here", "young", "new"}
    assert set(place.iterdir()) == {flash_directory(place, name) for name in kept}


def tamper(how: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``directory`` one that another user may have written."""
    if how == "link":
        directory.rename(directory.with_name("elsewhere"))
        directory.symlink_to(directory.with_name("elsewhere"))
    elif how == "owner":
        monkeypatch.setattr(slot_directories.os, "getuid", lambda: directory.stat().st_uid + 1)
    else:
        directory.chmod({"group": 0o720, "world": 0o702}[how])


@pytest.mark.parametrize("how", ["link", "owner", "group", "world"])
def test_states_that_others_could_have_written_are_neither_restored_nor_touched(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "z2a-key-0"

    first = tiny_manager(tmp_path, directory)
    first.begin_history(None)
    save(first, 10)
    assert tiny_manager(tmp_path, directory).find_restore_point().step == 10
    with monkeypatch.context() as patch:
        tamper(how, directory, patch)
        manager = tiny_manager(tmp_path, directory)
        assert manager.find_restore_point() is None
        manager.begin_history(None)
        assert [slot.header.step for slot in find_staged_slots(directory)] == [10], "a link may lead anywhere"
        with pytest.raises(PermissionError, match="z2a-key-0"):
            claim_flash_directory(directory, tmp_path)
        manager.save(20, TRAINING_STATE, durable=False)  # training continues without it
    assert "is not used" in capsys.readouterr().err


def test_the_key_of_a_run_is_readable_by_its_owner_only(workspace: Path, tmp_path: Path) -> None:
    """It names the directory of states in memory."""
    run = Run(tiny_recipe(workspace, f"out={tmp_path}/out"), tmp_path / "run")
    run.directory.mkdir()
    assert run.create_flash_dir() == run.create_flash_dir()
    assert stat.S_IMODE((run.directory / "key").stat().st_mode) == 0o600
