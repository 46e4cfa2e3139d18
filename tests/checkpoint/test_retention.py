"""Retention: leftovers of killed writes are removed, valid and unreadable checkpoints stay."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero2all.checkpoint.integrity as integrity
from tests.checkpoint.helpers import TRAINING_STATE, failing, flip_a_bit
from tests.checkpoint.threads import run_threads
from tests.conftest import tiny_recipe
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.paths import RemotePath, to_path
from zero2all.checkpoint import CheckpointStore, RankGroup, checkpoint_store
from zero2all.checkpoint.retention import Retention
from zero2all.checkpoint.state_dict import training_state_dict
from zero2all.checkpoint.training_state import UNKNOWN_LINEAGE, Branch, Lineage
from zero2all.train import train


def write(checkpoints: CheckpointStore, *steps: int, lineage: Lineage = UNKNOWN_LINEAGE, **changes: Any) -> None:
    model = nn.Linear(4, 4)
    for step in steps:
        tensors = training_state_dict(model, [torch.optim.SGD(model.parameters(), momentum=0.9)])
        checkpoints.write(step, tensors, replace(TRAINING_STATE, **changes), lineage, RankGroup())


def damage(checkpoints: CheckpointStore, step: int) -> None:
    flip_a_bit(next(checkpoints.path(step).glob("*.distcp")))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "RETRY_DELAYS", (0.0, 0.0))


def test_damaged_checkpoints_do_not_displace_valid_ones(tmp_path: Path) -> None:
    write(CheckpointStore(tmp_path, keep=2), 100, 200, 300)
    damage(CheckpointStore(tmp_path), 300)
    checkpoints = CheckpointStore(tmp_path, keep=2)  # a new process, which knows nothing yet
    write(checkpoints, 400)
    assert [step for step in checkpoints.steps() if checkpoints.is_valid(step)] == [200, 400]
    write(checkpoints, 500)
    assert checkpoints.steps() == [400, 500]  # and a damaged one does not stay for good


def test_the_best_is_one_that_is_valid(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, keep=1, keep_best=1)
    write(checkpoints, 1, bits_per_byte=2.0)
    write(CheckpointStore(tmp_path, keep=2, keep_best=1), 2, bits_per_byte=1.0)
    damage(checkpoints, 2)
    write(CheckpointStore(tmp_path, keep=1, keep_best=1), 3)
    assert checkpoints.steps() == [1, 3]


def test_an_unreadable_checkpoint_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(CheckpointStore(tmp_path, keep=3), 100, 200, 300)
    checkpoints = CheckpointStore(tmp_path, keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(integrity, "sha256_file", failing(integrity.sha256_file, 300))
        assert checkpoints.verify(300).kind == "unreadable"
        assert "cannot be read" in str(checkpoints.problem(300))
        assert checkpoints.newest_valid() == 200
        write(checkpoints, 250)  # the run resumed from 200: 300 is of a later step and stays
        assert checkpoints.steps() == [200, 250, 300]
        write(checkpoints, 400, 500)
    assert checkpoints.is_valid(500)
    assert checkpoints.steps() == [400, 500]  # by age, as any other


def test_states_of_an_abandoned_history_do_not_count(tmp_path: Path) -> None:
    """A run that could not read 300 resumed from 200. It never restores 300 again, so 300 must not displace 250."""
    checkpoints = CheckpointStore(tmp_path, keep=2)
    write(checkpoints, 100, 200, 300, lineage=(Branch("a", 0),))
    line = (Branch("a", 0), Branch("b", 200))
    write(checkpoints, 250, 350, lineage=line)
    assert checkpoints.steps() == [250, 300, 350]
    write(checkpoints, 400, lineage=line)
    assert checkpoints.steps() == [350, 400]


def test_ranks_agree_when_only_one_of_them_sees_the_damage(tmp_path: Path) -> None:
    write(CheckpointStore(tmp_path, keep=3), 100, 200, 300)
    damaged = CheckpointStore(tmp_path).path(200) / "state.json"  # the last of three files by name: the third rank's
    damaged.write_text(damaged.read_text().replace("200", "201"))
    kept = [CheckpointStore(tmp_path, keep=2) for _ in range(3)]
    kept[0].verify(300)  # the first knows more than the others
    run_threads(3, lambda ranks: Retention(kept[ranks.rank], 2, 0, ranks).apply(300))
    assert kept[0].steps() == [100, 200, 300]
    assert [100 in checkpoints.verified_steps for checkpoints in kept] == [True] * 3


def test_no_rank_starts_to_write_when_one_has_no_space_to_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for it in a collective, until its time-out."""
    pytest.importorskip("fsspec")
    saving, rank_of = [], threading.local()
    staging = checkpoint_store.staging_dir

    def full_on_one() -> AbstractContextManager[Path]:
        if rank_of.rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp")
        return staging()

    monkeypatch.setattr(checkpoint_store, "staging_dir", full_on_one)
    monkeypatch.setattr(checkpoint_store.CheckpointWriter, "write", lambda *args, **kwargs: saving.append(rank_of.rank))

    def save(ranks: RankGroup) -> str:
        rank_of.rank = ranks.rank
        checkpoints = CheckpointStore(to_path("memory://no-space-to-stage/checkpoints"))
        with pytest.raises((OSError, Z2aError), match="No space left") as failed:
            checkpoints.write(1, {}, TRAINING_STATE, UNKNOWN_LINEAGE, ranks)
        return str(failed.value)

    assert run_threads(3, save) == ["[Errno 28] No space left on device: '/tmp'"] * 3
    assert saving == []


def test_nothing_is_removed_before_enough_valid_ones_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(CheckpointStore(tmp_path, keep=3), 100, 200)
    checkpoints = CheckpointStore(tmp_path, keep=2)
    damage(checkpoints, 200)
    monkeypatch.setattr(integrity, "sha256_file", failing(integrity.sha256_file, 100))
    write(checkpoints, 300)
    assert checkpoints.steps() == [100, 200, 300]
    write(checkpoints, 400)
    assert checkpoints.steps() == [300, 400]


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ETIMEDOUT, errno.EACCES])
def test_a_transient_error_is_retried(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = CheckpointStore(tmp_path)
    write(checkpoints, 1)
    monkeypatch.setattr(integrity, "sha256_file", failing(integrity.sha256_file, 1, times=2, code=code))
    assert checkpoints.newest_valid() == 1


def test_a_listing_that_fails_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(checkpoints := CheckpointStore(tmp_path), 1)

    def scandir(path: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoints.steps()


def test_an_unreadable_state_may_be_permanent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(checkpoints := CheckpointStore(tmp_path, keep=1), 100, permanent=True)
    monkeypatch.setattr(Path, "read_text", failing(Path.read_text, 100, "state.json"))
    write(checkpoints, 200, 300)
    assert checkpoints.steps() == [100, 300]


def test_kept_checkpoints_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(CheckpointStore(tmp_path, keep=4), 1, 2, 3)
    hashed: list[str] = []
    sha256 = integrity.sha256_file
    monkeypatch.setattr(integrity, "sha256_file", lambda path: hashed.append(path.parent.name) or sha256(path))
    checkpoints = CheckpointStore(tmp_path, keep=3)
    write(checkpoints, 4)
    assert set(hashed) == {"step-00000002", "step-00000003"}
    hashed.clear()
    write(checkpoints, 5, 6, 7)
    assert hashed == []


def test_a_truncated_file_is_noticed_without_hashing(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, keep=2)
    write(checkpoints, 1, 2)
    os.truncate(next(checkpoints.path(2).glob("*.distcp")), 10)
    write(checkpoints, 3)
    assert checkpoints.steps() == [1, 2, 3]
    assert not checkpoints.is_valid(2)


@pytest.mark.parametrize("manifest", ["{", "[]", "{}", '{"kind": "checkpoint", "key": "1"}', '{"files": 3}'])
def test_a_damaged_manifest_is_a_damaged_checkpoint(manifest: str, tmp_path: Path) -> None:
    write(checkpoints := CheckpointStore(tmp_path), 1)
    (checkpoints.path(1) / "manifest.json").write_text(manifest)
    assert checkpoints.verify(1).kind == "damaged"
    assert "manifest.json" in str(checkpoints.problem(1))


def create_leftovers(directory: Path) -> None:
    for name in (".step-00000002.partial-27014", ".step-00000003.old-1", f".step-00000005.partial-{os.getpid()}"):
        (directory / name).mkdir(parents=True)
        (directory / name / "__0_0.distcp").write_bytes(b"x" * 100)


def test_a_start_removes_what_killed_writes_left(workspace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workspace, f"out={tmp_path}", "train.steps=1")
    create_leftovers(recipe.run_dir / "checkpoints")
    train(recipe)
    assert os.listdir(recipe.run_dir / "checkpoints") == ["step-00000001"]


def test_a_removal_that_is_killed_leaves_no_half_removed_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(checkpoints := CheckpointStore(tmp_path), 1, 2)

    def killed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.remove(1)
    assert checkpoints.steps() == [2]
    checkpoints.remove_leftovers()
    assert os.listdir(tmp_path) == ["step-00000002"]


def test_a_removal_that_fails_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = CheckpointStore(tmp_path, keep=1)

    def refused(step: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(checkpoints.path(step)))

    write(checkpoints, 1)
    monkeypatch.setattr(checkpoints, "remove", refused)
    write(checkpoints, 2)
    assert checkpoints.newest_valid() == 2


@pytest.mark.slow
def test_in_an_object_store_unfinished_checkpoints_are_removed(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place, local = to_path(f"{s3}/checkpoints"), tmp_path / "file"
    checkpoints = CheckpointStore(place, keep=2)
    write(checkpoints, 1)
    local.write_bytes(b"x")
    for name in ("step-00000002/__0_0.distcp", "step-00000003/__1_0.distcp", "step-00000004/thesis.txt"):
        (place / name).put(local)
    local.write_text(json.dumps({"kind": "checkpoint", "unfinished": True}))
    (place / "step-00000002/manifest.json").put(local)
    local.unlink()
    checkpoints.remove_leftovers()
    assert checkpoints.steps() == [1, 4]  # what is not ours stays
    (place / "step-00000004/thesis.txt").unlink()
    write(checkpoints, 5, 6)
    assert checkpoints.steps() == [5, 6]
    assert list(tmp_path.glob(".z2a.*")) == []  # staged files; torch may put a cache there


@pytest.mark.parametrize(("name", "is_ours"), [("__0_0.distcp", True), ("thesis.txt", False)])
def test_a_half_removed_step_of_an_object_store_is_written_again(name: str, is_ours: bool, tmp_path: Path) -> None:
    """A run that rolls back writes it again; the removal was killed after the manifest."""
    pytest.importorskip("fsspec")
    place = to_path(f"memory://half-removed-{is_ours}/checkpoints")
    (tmp_path / "file").write_bytes(b"x")
    (place / "step-00000002" / name).put(tmp_path / "file")
    (place / "step-00000002" / "state.json").put(tmp_path / "file")
    checkpoints = CheckpointStore(place)
    if is_ours:
        write(checkpoints, 2)
        assert checkpoints.problem(2) is None
    else:
        with pytest.raises(UsageError, match="something else"):
            write(checkpoints, 2)
        assert (place / "step-00000002" / name).exists()


@pytest.mark.slow
def test_an_object_store_that_does_not_respond_costs_no_checkpoint(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = CheckpointStore(to_path(f"{s3}/checkpoints"), keep=1)
    write(checkpoints, 1)
    read_bytes = RemotePath.read_bytes

    def no_manifest(path: RemotePath, *args: Any, **kwargs: Any) -> bytes:
        if path.name == "manifest.json":
            raise Z2aError(f"the store failed at {path}")
        return read_bytes(path, *args, **kwargs)

    monkeypatch.setattr(RemotePath, "read_bytes", no_manifest)
    assert checkpoints.verify(1).kind == "unreadable"
    checkpoints.remove_leftovers()
    monkeypatch.undo()
    assert checkpoints.newest_valid() == 1


def test_the_newest_checkpoint_is_of_the_current_history(tmp_path: Path) -> None:
    """Exports and evaluations take the state that a resume would continue from, not one that the run has left."""
    checkpoints = CheckpointStore(tmp_path, keep=9)
    line = (Branch("a1", 0), Branch("b2", 900))
    write(checkpoints, 900, 1000, lineage=line[:1])
    write(checkpoints, 950, lineage=line)
    assert checkpoints.newest_valid(line) == 950
    damage(checkpoints, 950)
    assert checkpoints.newest_valid(line) == 900
    damage(checkpoints, 900)
    assert checkpoints.newest_valid(line) == 1000  # better than none
    assert checkpoints.newest_valid() == 1000
