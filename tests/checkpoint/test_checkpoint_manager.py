"""The checkpoint manager during training: full memory, slow storage, and a record that lags behind."""

from __future__ import annotations

import errno
import os
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoint.helpers import TRAINING_STATE, committed_steps, resume, save, tiny_manager
from tests.checkpoint.threads import Rank0Store, run_threads
from tests.conftest import tiny_recipe
from zero2all.base.console import console
from zero2all.checkpoint import CheckpointStore, RankGroup, background, flash
from zero2all.checkpoint.staged_slot import find_staged_slots
from zero2all.cluster.launch.heartbeat import Heartbeat, create_heartbeat
from zero2all.track import RunRecord
from zero2all.track.run_record import AppendFile
from zero2all.track.sinks import AsyncWriter
from zero2all.train import train


class SlowStorage(CheckpointStore):
    """A write ends when the test sets ``done``."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.started, self.done = threading.Event(), threading.Event()

    def write(self, *args: Any) -> None:
        self.started.set()
        assert self.done.wait(120)
        super().write(*args)


# Ranks that moved


def test_slots_of_ranks_that_moved_away_are_removed(tmp_path: Path) -> None:
    """Nodes of two ranks each; after another rendezvous they have each other's ranks."""

    def start(nodes: str) -> None:
        def rank(rank_group: RankGroup) -> None:
            directory = tmp_path / nodes[rank_group.rank] / "z2a-key-0"
            manager = tiny_manager(tmp_path, directory, rank_group, Rank0Store(tmp_path / "durable"))
            found = resume(manager)
            save(manager, 10 if found is None else found.step + 10, durable=True)

        run_threads(len(nodes), rank)

    for node in "AB":
        (tmp_path / node).mkdir()
    start("AABB")
    start("BBAA")
    held = {node: sorted(path.name for path in (tmp_path / node / "z2a-key-0").glob("rank-*")) for node in "AB"}
    assert held == {"A": ["rank-2-of-4", "rank-3-of-4"], "B": ["rank-0-of-4", "rank-1-of-4"]}
    start("BBAA")
    assert {slot.header.step for slot in find_staged_slots(tmp_path / "A" / "z2a-key-0")} == {20, 30}, "their own stay"


# Not enough space


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_without_space_in_memory_a_flash_step_does_not_wait_for_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    storage = SlowStorage(tmp_path / "durable")
    manager = tiny_manager(tmp_path, tmp_path / "memory" / "z2a-key-0", storage=storage)
    manager.save(1, TRAINING_STATE, durable=True)
    assert storage.started.wait(60)
    saved = threading.Thread(target=manager.save, args=(2, TRAINING_STATE), kwargs={"durable": False}, daemon=True)
    saved.start()
    saved.join(30)
    waited = saved.is_alive()
    storage.done.set()
    manager.wait_until_saved()
    assert not waited, "training stalled until the checkpoint was written"
    assert storage.steps() == [1]
    said = " ".join(capsys.readouterr().err.split())
    for remedy in ("--shm-size=", "--ipc=host", "emptyDir", "medium: Memory"):
        assert remedy in said


# Slow storage


def test_waiting_for_storage_is_not_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.checkpoint.pending_write.HEARTBEAT_INTERVAL", 0.01)
    monkeypatch.setattr("zero2all.checkpoint.pending_write.LOG_INTERVAL", 0.02)
    storage = SlowStorage(tmp_path / "durable")
    heartbeat, seen = create_heartbeat(tmp_path, 0), []
    heartbeat(41)
    before = heartbeat.read()

    def on_wait() -> None:
        heartbeat.ping()
        seen.append(heartbeat.read())
        if len(seen) == 3:
            storage.done.set()

    manager = tiny_manager(tmp_path, storage=storage, on_wait=on_wait)
    manager.save(1, TRAINING_STATE, durable=True)
    manager.finish_pending_write()
    assert len(seen) >= 3
    assert seen[2].time > before.time
    assert (seen[2].step, seen[2].phase_times) == (41, before.phase_times)


def test_storage_that_never_responds_is_a_hang_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.checkpoint.pending_write.HEARTBEAT_INTERVAL", 0.01)
    monkeypatch.setattr("zero2all.checkpoint.pending_write.COLLECTIVE_TIMEOUT", timedelta(0))
    storage = SlowStorage(tmp_path / "durable")
    heartbeats: list[int] = []
    manager = tiny_manager(tmp_path, storage=storage, on_wait=lambda: heartbeats.append(1))
    manager.save(1, TRAINING_STATE, durable=True)
    threading.Timer(0.2, storage.done.set).start()
    manager.finish_pending_write()
    assert heartbeats == []


def test_a_run_sends_heartbeats_while_it_waits_for_storage(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint every step, and a write that lasts until the run has sent a heartbeat."""
    monkeypatch.setattr("zero2all.checkpoint.pending_write.HEARTBEAT_INTERVAL", 0.01)
    alive, write = threading.Event(), CheckpointStore.write
    monkeypatch.setattr(Heartbeat, "ping", lambda self: alive.set())

    def slow(*args: Any) -> None:
        assert alive.wait(120), "no heartbeat"
        write(*args)

    monkeypatch.setattr(CheckpointStore, "write", slow)
    train(tiny_recipe(workspace, f"out={tmp_path}/out", "checkpoint.every=1 steps", "train.steps=3"))
    assert alive.is_set()


# A record that lags behind, a marker that cannot be written


def test_a_state_that_the_record_lags_behind_is_not_committed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_written = iter((True, True, False, False))
    manager = tiny_manager(tmp_path, tmp_path / "z2a-key-0", before_commit=lambda: next(record_written))
    save(manager, 10, 20, 30, 40)
    assert committed_steps(tmp_path / "z2a-key-0") == {20}
    assert "the state of step 30 is not kept in memory" in capsys.readouterr().err
    assert manager.find_restore_point().step == 20


def test_a_lagging_record_of_another_rank_leaves_a_common_state(tmp_path: Path) -> None:
    """The run's record is rank 0's: one that lags on another rank is no reason to lose the state of all."""

    def rank(rank_group: RankGroup) -> int | None:
        directory = tmp_path / f"node-{rank_group.rank}" / "z2a-key-0"
        storage = Rank0Store(tmp_path / "durable")
        manager = tiny_manager(tmp_path, directory, rank_group, storage, before_commit=lambda: rank_group.rank == 0)
        manager.begin_history(None)
        save(manager, 10, 20, 30, 40)
        found = manager.find_restore_point()
        return None if found is None else found.step

    assert run_threads(2, rank) == [40, 40]


def test_a_rank_with_a_quiet_console_logs_that_its_state_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = tiny_manager(tmp_path, tmp_path / "z2a-key-0")
    save(manager, 10)
    monkeypatch.setattr(console, "quiet", True)
    monkeypatch.setattr(Path, "replace", no_space)
    save(manager, 20)
    assert "the state of step 20 cannot be kept in memory" in capsys.readouterr().err


def test_a_run_asks_whether_its_record_is_written(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RunRecord, "flush", lambda self, timeout=0.0: False)
    monkeypatch.setattr(AsyncWriter, "pending", 1)
    overrides = ("checkpoint.flash_every=1 steps", f"checkpoint.flash_dir={tmp_path}/memory", "train.steps=2")
    train(tiny_recipe(workspace, f"out={tmp_path}/out", *overrides))
    said = " ".join(capsys.readouterr().err.split())
    assert "the state of step 1 is not kept in memory" in said
    assert "the run record has not caught up with the checkpoint of step 2" in said


def test_lines_that_were_lost_do_not_hold_up_states_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunRecord(tmp_path / "record.jsonl", system_every=None) as record:
        record.step(0, loss=1.0)
        assert not record.has_unwritten_lines(30.0)
        record._writers[0].dropped = 1
        assert not record.flush()
        assert not record.has_unwritten_lines()
        monkeypatch.setattr(AppendFile, "write", no_space)
        record.step(1, loss=1.0)
        assert record.has_unwritten_lines(0.2)


def test_a_state_without_a_marker_is_overwritten_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = tiny_manager(tmp_path, tmp_path / "z2a-key-0")
    replace = Path.replace
    for step, full in ((10, False), (20, False), (30, True), (40, True)):
        monkeypatch.setattr(Path, "replace", no_space if full else replace)
        save(manager, step)
    assert committed_steps(tmp_path / "z2a-key-0") == {20}


# GPU code, with a fake


def test_memory_that_cannot_be_pinned_costs_speed_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes, cleared = [2, 0], []
    runtime = SimpleNamespace(cudaHostRegister=lambda pointer, size, flags: codes.pop(0))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(flash, "clear_cuda_error", lambda: cleared.append(True))
    flash.pin_slot_memory(torch.zeros(8, dtype=torch.uint8))
    assert "cannot be pinned (CUDA error 2)" in capsys.readouterr().err
    assert cleared == [True], "the next kernel would fail for it"
    flash.pin_slot_memory(torch.zeros(8, dtype=torch.uint8))
    assert capsys.readouterr().err == ""
    assert cleared == [True]


def test_a_background_thread_has_a_low_priority_unless_training_waits_for_it() -> None:
    seen: list[int] = []

    def note_priority() -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    background.run_in_background(note_priority).result(30)
    background.run_in_background(note_priority, niceness=0).result(30)
    own = os.getpriority(os.PRIO_PROCESS, os.getpid())
    assert seen == [min(19, own + background.BACKGROUND_NICENESS), own]


def test_a_background_thread_works_on_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append((device, threading.get_ident())))
    seen: list[int] = []
    background.run_in_background(lambda: seen.append(threading.get_ident())).result(30)
    assert chosen == [(3, seen[0])]
