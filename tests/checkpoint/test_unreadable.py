"""Storage that fails at a restart, on all ranks or on some: no state is abandoned for it."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import zero2all.checkpoint.integrity as integrity
import zero2all.checkpoint.run_history as history_module
from tests.checkpoint.helpers import failing, flip_a_bit, resume, save, tiny_manager
from tests.checkpoint.threads import Rank0Store, run_threads
from zero2all.base.errors import Z2aError
from zero2all.checkpoint import CheckpointManager, CheckpointStore, DamagedStateError, RankGroup, checkpoint_directory
from zero2all.checkpoint.checkpoint_directory import CheckpointDirectory, wait_until_readable
from zero2all.checkpoint.restore import DurableReport, decide_restore
from zero2all.checkpoint.training_state import UNKNOWN_LINEAGE, read_lineage


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "RETRY_DELAYS", (0.0, 0.0))


def make_manager(root: Path, rank_group: RankGroup) -> CheckpointManager:
    return tiny_manager(root, rank_group=rank_group, storage=Rank0Store(root / "checkpoints"))


def trained(root: Path, *steps: int) -> None:
    manager = make_manager(root, RankGroup())
    manager.begin_history(None)
    save(manager, *steps, durable=True)


def load_newest(root: Path, rank_group: RankGroup) -> int | None:
    """The step that is loaded; checksums are computed meanwhile, so a damaged state is found at the end."""
    manager = make_manager(root, rank_group)
    while True:
        with suppress(DamagedStateError):
            return None if (found := resume(manager)) is None else found.step


def restored(root: Path, world_size: int = 1) -> list[int | None]:
    return run_threads(world_size, lambda rank_group: load_newest(root, rank_group))


def test_one_failed_read_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, 900, 1000)
    monkeypatch.setattr(
        checkpoint_directory, "read_json", failing(checkpoint_directory.read_json, 1000, "state.json", 1)
    )
    assert restored(tmp_path) == [1000]


def test_a_restart_does_not_fall_back_from_a_checkpoint_whose_state_is_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, 900, 1000)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_directory, "read_json", failing(checkpoint_directory.read_json, 1000, "state.json"))
        with pytest.raises(Z2aError, match="step-00001000 cannot be read"):
            restored(tmp_path)
    assert restored(tmp_path) == [1000]


@pytest.mark.parametrize("shard", [".metadata", "__0_0.distcp"])
def test_one_rank_that_cannot_read_its_share_ends_the_attempt_of_all(
    shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, 900, 1000)
    failures: list[str] = []

    def rank(rank_group: RankGroup) -> None:
        with pytest.raises(Z2aError, match="step-00001000 cannot be read") as caught:
            load_newest(tmp_path, rank_group)
        failures.append(str(caught.value))

    with monkeypatch.context() as patch:
        patch.setattr(integrity, "sha256_file", failing(integrity.sha256_file, 1000, shard))
        run_threads(3, rank)
    assert len(failures) == 3
    assert len(set(failures)) == 1
    assert restored(tmp_path, 3) == [1000] * 3


def test_a_damaged_checkpoint_is_still_skipped(tmp_path: Path) -> None:
    trained(tmp_path, 900, 1000)
    (tmp_path / "checkpoints" / "step-00001000" / "state.json").write_text("{", encoding="utf-8")
    assert restored(tmp_path) == [900]
    trained(tmp_path, 1000)
    (tmp_path / "checkpoints" / "step-00001000" / "state.json").unlink()
    assert restored(tmp_path) == [900]


def damage(root: Path, step: int, name: str = "__0_0.distcp") -> None:
    flip_a_bit(root / "checkpoints" / f"step-{step:08}" / name)


def test_a_state_whose_checksum_is_wrong_is_not_read(tmp_path: Path) -> None:
    trained(tmp_path, 900, 1000)
    damage(tmp_path, 1000, "state.json")
    assert make_manager(tmp_path, RankGroup()).find_restore_point().step == 900


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_flipped_bit_is_found_while_the_state_is_loaded(ranks: int, tmp_path: Path) -> None:
    trained(tmp_path, 900, 1000)
    damage(tmp_path, 1000)
    assert restored(tmp_path, ranks) == [900] * ranks


def test_the_only_checkpoint_is_verified_before_it_overwrites_the_weights(tmp_path: Path) -> None:
    trained(tmp_path, 1000)
    damage(tmp_path, 1000)
    assert restored(tmp_path) == [None]


def test_if_all_are_damaged_training_does_not_start_with_overwritten_weights(tmp_path: Path) -> None:
    trained(tmp_path, 900, 1000)
    damage(tmp_path, 900)
    damage(tmp_path, 1000)
    with pytest.raises(Z2aError, match="no valid state is left"):
        restored(tmp_path)


def test_checksums_are_computed_while_the_state_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either waits for the other to start, so one after the other would fail. The state is read before either."""
    trained(tmp_path, 900, 1000)
    verifies, loads = threading.Event(), threading.Event()
    hash_file, load = integrity.sha256_file, CheckpointStore.load

    def hash_during_load(path: Path) -> str:
        if path.name == "state.json":
            return hash_file(path)
        verifies.set()
        assert loads.wait(30), "the load has not started"
        return hash_file(path)

    def load_during_hash(*arguments: Any) -> None:
        loads.set()
        assert verifies.wait(30), "no checksum is computed"
        load(*arguments)

    monkeypatch.setattr(integrity, "sha256_file", hash_during_load)
    monkeypatch.setattr(CheckpointStore, "load", load_during_hash)
    assert restored(tmp_path) == [1000]


def test_an_unreadable_checkpoint_matters_only_if_nothing_newer_is_valid() -> None:
    lineage = UNKNOWN_LINEAGE
    unreadable = DurableReport("x", 900, None, ("it cannot be read",), unreadable=True)
    found = decide_restore([], [unreadable, DurableReport("y", 950, lineage)], lineage).chosen
    assert found.step == 950
    older = [DurableReport("y", 850, lineage), unreadable]
    with pytest.raises(Z2aError, match="x cannot be read"):
        decide_restore([], older, lineage)
    with pytest.raises(Z2aError, match="x cannot be read"):
        decide_restore([], [unreadable], None)
    assert decide_restore([], older, lineage, max_step=899).chosen is not None


# The history file


def test_a_failed_history_file_is_written_with_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """History B began at 900 and is recorded; C began there too, and could not be recorded."""
    trained(tmp_path, 900)
    resume(make_manager(tmp_path, RankGroup()))
    original, full = history_module.write_json, [True]

    def write_json(path: Path, value: Any) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        original(path, value)

    monkeypatch.setattr(history_module, "write_json", write_json)

    def rank(rank_group: RankGroup) -> None:
        manager = make_manager(tmp_path, rank_group)
        resume(manager)
        save(manager, 950, durable=True)  # the checkpoint is worth more than the history file
        rank_group.on_all_ranks(lambda: None)
        full[0] = False
        save(manager, 1000, durable=True)
        assert read_lineage(tmp_path) == manager.history.lineage

    run_threads(2, rank)
    assert restored(tmp_path) == [1000]


# Rolling back


def test_checkpoints_that_cannot_be_removed_after_a_rollback_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, 900, 1000)

    def remove(self: object, step: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), f"step-{step}")

    monkeypatch.setattr(Rank0Store, "remove", remove)

    def rank(rank_group: RankGroup) -> None:
        assert make_manager(tmp_path, rank_group).roll_back(950).step == 900

    run_threads(2, rank)
    assert "checkpoints after step 900 cannot be removed" in " ".join(capsys.readouterr().err.split())
    monkeypatch.undo()
    assert restored(tmp_path) == [900], "what was left is of an abandoned history"


def test_a_restart_waits_for_storage_that_fails_and_not_for_one_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_directory, "STORAGE_POLL", 0.0)
    store, errors = CheckpointStore(tmp_path), [errno.EIO, errno.ESTALE, errno.ELOOP]
    failures = iter(errors)

    def entry_names(self: CheckpointDirectory) -> set[str]:
        if (code := next(failures, None)) is not None:
            raise OSError(code, os.strerror(code))
        return set()

    monkeypatch.setattr(CheckpointDirectory, "_entry_names", entry_names)
    wait_until_readable(store)
    failures = iter(errors)
    with pytest.raises(OSError, match=r"Input/output error"):
        wait_until_readable(store, patience=0.0)
    failures = iter([errno.EACCES])
    with pytest.raises(PermissionError):
        wait_until_readable(store)
