"""What a keeper does while training goes on: room, slow storage, and a record that lags behind."""

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
from torch import nn

from tests.conftest import tiny_recipe
from tests.resilience.threads import OneWriter, run_threads
from zero2all.console import console
from zero2all.resilience import Checkpoints, Keeper, Team, flash
from zero2all.resilience.beat import Beat, new_beat
from zero2all.resilience.flash import staged_in
from zero2all.track import Record
from zero2all.track.pump import Pump
from zero2all.track.reslog import AppendFile
from zero2all.train import train


def a_model() -> tuple[nn.Linear, list[torch.optim.Optimizer]]:
    model = nn.Linear(8, 8, bias=False)
    return model, [torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)]


class SlowStorage(Checkpoints):
    """A write ends when the test says so."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.begun, self.done = threading.Event(), threading.Event()

    def write(self, *args: Any) -> None:
        self.begun.set()
        assert self.done.wait(120)
        super().write(*args)


# Ranks that moved


def test_slots_of_ranks_that_moved_away_are_removed(tmp_path: Path) -> None:
    """Nodes of two ranks each; after another rendezvous they hold each other's numbers."""

    def start(nodes: str) -> None:
        def rank(team: Team) -> None:
            model, optimizers = a_model()
            directory = tmp_path / nodes[team.rank] / "z2a-key-0"
            keeper = Keeper(OneWriter(tmp_path / "durable"), directory, tmp_path, model, optimizers, team)
            found = keeper.newest()
            if found is not None:
                keeper.load(found)
            else:
                keeper.begin(None)
            keeper.save(10 if found is None else found.step + 10, {"skipped": []}, durable=True)
            keeper.wait()

        run_threads(len(nodes), rank)

    for node in "AB":
        (tmp_path / node).mkdir()
    start("AABB")
    start("BBAA")
    held = {node: sorted(path.name for path in (tmp_path / node / "z2a-key-0").glob("rank-*")) for node in "AB"}
    assert held == {"A": ["rank-2-of-4", "rank-3-of-4"], "B": ["rank-0-of-4", "rank-1-of-4"]}
    start("BBAA")
    assert {slot.step for slot in staged_in(tmp_path / "A" / "z2a-key-0")} == {20, 30}, "their own stay"


# Too little room


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_without_room_a_flash_step_does_not_wait_for_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    model, optimizers = a_model()
    storage = SlowStorage(tmp_path / "durable")
    keeper = Keeper(storage, tmp_path / "memory" / "z2a-key-0", tmp_path, model, optimizers, Team())
    keeper.save(1, {"skipped": []}, durable=True)
    assert storage.begun.wait(60)
    saved = threading.Thread(target=keeper.save, args=(2, {"skipped": []}, False), daemon=True)
    saved.start()
    saved.join(30)
    waited = saved.is_alive()
    storage.done.set()
    keeper.wait()
    assert not waited, "training stood still until the checkpoint was written"
    assert storage.steps() == [1]
    said = " ".join(capsys.readouterr().err.split())
    for remedy in ("--shm-size=", "--ipc=host", "emptyDir", "medium: Memory"):
        assert remedy in said


# Slow storage


def test_waiting_for_storage_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.resilience.keeper.SIGN", 0.01)
    monkeypatch.setattr("zero2all.resilience.keeper.SAY", 0.02)
    model, optimizers = a_model()
    storage = SlowStorage(tmp_path / "durable")
    keeper = Keeper(storage, None, tmp_path, model, optimizers, Team())
    beat, seen = new_beat(tmp_path, 0), []
    beat(41)
    before = beat.read()

    def sign() -> None:
        beat.alive()
        seen.append(beat.read())
        if len(seen) == 3:
            storage.done.set()

    keeper.on_wait = sign
    keeper.save(1, {"skipped": []}, durable=True)
    keeper.settle()
    assert len(seen) >= 3
    assert seen[2].time > before.time
    assert (seen[2].step, seen[2].marks) == (41, before.marks)


def test_storage_that_never_answers_is_one_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.resilience.keeper.SIGN", 0.01)
    monkeypatch.setattr("zero2all.resilience.keeper.PATIENCE", timedelta(0))
    model, optimizers = a_model()
    storage = SlowStorage(tmp_path / "durable")
    keeper = Keeper(storage, None, tmp_path, model, optimizers, Team())
    signs: list[int] = []
    keeper.on_wait = lambda: signs.append(1)
    keeper.save(1, {"skipped": []}, durable=True)
    threading.Timer(0.2, storage.done.set).start()
    keeper.settle()
    assert signs == []


def test_a_run_sends_heartbeats_while_it_waits_for_storage(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint every step, and a write that takes until the run has given a sign of life."""
    monkeypatch.setattr("zero2all.resilience.keeper.SIGN", 0.01)
    alive, write = threading.Event(), Checkpoints.write
    monkeypatch.setattr(Beat, "alive", lambda self: alive.set(), raising=False)

    def slow(*args: Any) -> None:
        assert alive.wait(120), "no heartbeat"
        write(*args)

    monkeypatch.setattr(Checkpoints, "write", slow)
    train(tiny_recipe(world, f"out={tmp_path}/out", "checkpoint.every=1 steps", "train.steps=3"))
    assert alive.is_set()


# A record that lags behind, a marker that cannot be written


def test_a_state_that_the_record_lags_behind_does_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizers = a_model()
    keeper = Keeper(Checkpoints(tmp_path / "durable"), tmp_path / "z2a-key-0", tmp_path, model, optimizers, Team())
    for step, written in ((10, True), (20, True), (30, False), (40, False)):
        keeper.before_commit = lambda written=written: written
        keeper.save(step, {"skipped": []}, durable=False)
        keeper.wait()
    assert {slot.step for slot in staged_in(tmp_path / "z2a-key-0") if slot.hash is not None} == {20}
    assert "the state of step 30 is not kept in memory" in capsys.readouterr().err
    found = keeper.newest()
    assert found is not None
    assert found.step == 20


def test_a_lagging_record_of_another_rank_leaves_a_common_state(tmp_path: Path) -> None:
    """The record of the run is the first rank's: one that lags elsewhere is no reason to lose the state of all."""

    def rank(team: Team) -> int | None:
        model, optimizers = a_model()
        directory = tmp_path / f"node-{team.rank}" / "z2a-key-0"
        keeper = Keeper(OneWriter(tmp_path / "durable"), directory, tmp_path, model, optimizers, team)
        keeper.begin(None)
        for step in (10, 20, 30, 40):
            keeper.before_commit = lambda step=step: team.rank == 0 or step < 30
            keeper.save(step, {"skipped": []}, durable=False)
            keeper.wait()
        found = keeper.newest()
        return None if found is None else found.step

    assert run_threads(2, rank) == [40, 40]


def test_a_rank_with_a_quiet_console_says_that_its_state_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizers = a_model()
    keeper = Keeper(Checkpoints(tmp_path / "durable"), tmp_path / "z2a-key-0", tmp_path, model, optimizers, Team())
    keeper.save(10, {"skipped": []}, durable=False)
    keeper.wait()
    monkeypatch.setattr(console, "quiet", True)
    monkeypatch.setattr(Path, "replace", no_room)
    keeper.save(20, {"skipped": []}, durable=False)
    keeper.wait()
    assert "the state of step 20 cannot be kept in memory" in capsys.readouterr().err


def test_a_run_asks_whether_its_record_is_written(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Record, "flush", lambda self, timeout=0.0: False)
    monkeypatch.setattr(Pump, "waiting", 1, raising=False)
    overrides = ("checkpoint.flash_every=1 steps", f"checkpoint.flash_dir={tmp_path}/memory", "train.steps=2")
    train(tiny_recipe(world, f"out={tmp_path}/out", *overrides))
    said = " ".join(capsys.readouterr().err.split())
    assert "the state of step 1 is not kept in memory" in said
    assert "the run record has not caught up with the checkpoint of step 2" in said


def test_lines_that_were_lost_do_not_hold_up_states_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Record(tmp_path / "record.jsonl", system_every=None) as record:
        record.step(0, loss=1.0)
        assert not record.lags(30.0)
        record._pumps[0].lost = 1
        assert not record.flush()
        assert not record.lags()
        monkeypatch.setattr(AppendFile, "write", no_room)
        record.step(1, loss=1.0)
        assert record.lags(0.2)


def test_a_state_without_a_marker_is_overwritten_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizers = a_model()
    keeper = Keeper(Checkpoints(tmp_path / "durable"), tmp_path / "z2a-key-0", tmp_path, model, optimizers, Team())
    replace = Path.replace
    for step, full in ((10, False), (20, False), (30, True), (40, True)):
        monkeypatch.setattr(Path, "replace", no_room if full else replace)
        keeper.save(step, {"skipped": []}, durable=False)
        keeper.wait()
    assert {slot.step for slot in staged_in(tmp_path / "z2a-key-0") if slot.hash is not None} == {20}


# What needs a GPU, with a stand-in


def test_memory_that_cannot_be_pinned_costs_speed_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes, cleared = [2, 0], []
    runtime = SimpleNamespace(cudaHostRegister=lambda pointer, size, flags: codes.pop(0))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(flash, "clear_cuda_error", lambda: cleared.append(True))
    flash.pin(torch.zeros(8, dtype=torch.uint8))
    assert "cannot be pinned (CUDA error 2)" in capsys.readouterr().err
    assert cleared == [True], "the next kernel would fail for it"
    flash.pin(torch.zeros(8, dtype=torch.uint8))
    assert capsys.readouterr().err == ""
    assert cleared == [True]


def test_a_background_thread_works_on_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append((device, threading.get_ident())))
    seen: list[int] = []
    flash.in_background(lambda: seen.append(threading.get_ident())).result(30)
    assert chosen == [(3, seen[0])]
