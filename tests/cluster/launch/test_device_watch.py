"""Where a GPU is stuck, with stand-ins for its events: a real one needs a GPU. Heartbeats, read at any moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from zero2all.cluster.launch import worker
from zero2all.cluster.launch.flight_recorder import GroupTrace, RecordedCollective, merge_dumps, read_device_state
from zero2all.cluster.launch.hang_detection import HungRank, find_hang_culprits, waits_in_collective
from zero2all.cluster.launch.heartbeat import (
    WATCHED_STEPS,
    DevicePosition,
    DeviceWatch,
    Heartbeat,
    StartupPhase,
    create_heartbeat,
)
from zero2all.train.data_loader import HostCopy
from zero2all.train.step_timer import HostClock, StepTimer


class Device:
    """Completes events in order, as a stream does. No event is ever waited for."""

    def __init__(self) -> None:
        self.completed = 0
        self.recorded = 0

    def now(self) -> StandInEvent:
        self.recorded += 1
        return StandInEvent(self, self.recorded)

    def seconds(self, begin: object, end: object) -> float:
        return 0.0


class StandInEvent:
    def __init__(self, device: Device, number: int) -> None:
        self._device, self._number = device, number

    def query(self) -> bool:
        return self._number <= self._device.completed


def test_the_device_is_in_the_part_whose_end_it_has_not_reached() -> None:
    clock = [100.0]
    device, watch = Device(), DeviceWatch(lambda: clock[0])
    assert watch.position() is None
    watch.add("forward", device.now())  # before the first step: nothing is watched
    watch.begin_step(7)
    for _ in range(2):
        for part in ("backward", "forward", "communication", "forward", "loss", "forward", "backward"):
            watch.add(part, device.now())
            clock[0] += 1.0
    clock[0] = 150.0
    places = []
    for device.completed in range(1, 16):
        found = watch.position()
        places.append("" if found is None else f"{found.part} {found.micro_batch}")
    assert places[1:8] == [
        "backward 0", "forward 0", "communication 0", "forward 0", "loss 0", "forward 0", "backward 0"
    ]  # fmt: skip
    assert places[9:11] == ["forward 1", "communication 1"]
    assert places[-1] == "", "all is done: the device waits for its host"
    device.completed = 10
    assert watch.position() == DevicePosition("forward", 7, 1, 42.0)
    assert str(watch.position()) == "forward of micro-batch 1 of step 7, launched 42 s ago"


def test_the_marks_of_old_steps_are_dropped() -> None:
    device, watch = Device(), DeviceWatch()
    for step in range(100):
        watch.begin_step(step)
        watch.add("forward", device.now())
    found = watch.position()
    assert found.step == 100 - WATCHED_STEPS, "the device is behind all that is watched"


def test_the_step_timer_hands_its_events_to_the_watch() -> None:
    device, watch = Device(), DeviceWatch()
    timer = StepTimer(device, watch)
    watch.begin_step(3)
    timer.restart()
    with timer.part("backward"), timer.part("forward"):
        device.completed = device.recorded - 1
        found = watch.position()
    assert (found.part, found.step) == ("backward", 3)
    on_cpu = StepTimer(HostClock())
    with on_cpu.part("forward"):
        pass


def test_the_host_says_that_it_waits_while_it_reads_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = DeviceWatch()
    monkeypatch.setattr("zero2all.train.data_loader.DEVICE_WATCH", watch)
    monkeypatch.setattr(worker, "DEVICE_WATCH", watch)
    seen: list[bool] = []

    class Copied:
        def synchronize(self) -> None:
            seen.append(worker._device_state().host_waits)

    copy = HostCopy(torch.ones(1, 2), torch.ones(3))
    copy._copied = Copied()
    assert copy.tolist() == ([[1.0, 1.0]], [1.0, 1.0, 1.0])
    assert (seen, watch.is_host_waiting()) == ([True], False)


def test_a_device_that_has_failed_has_no_position(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    watch = DeviceWatch()
    watch.begin_step(1)
    watch.add("forward", Failed())
    monkeypatch.setattr(worker, "DEVICE_WATCH", watch)
    assert worker._device_state().position is None


def collective(state: str) -> RecordedCollective:
    return RecordedCollective("nccl:all_reduce", 4, ("0", "default_pg"), 1, state)


def test_a_host_that_waits_for_its_device_is_no_culprit() -> None:
    nowhere = 'Thread 0x7f (most recent call first):\n  File "/gone/extension.py", line 3 in read\n'
    assert not waits_in_collective(nowhere, [])
    assert waits_in_collective(nowhere, [], host_waits=True)
    assert waits_in_collective(nowhere, [collective("scheduled")])
    assert not waits_in_collective(nowhere, [collective("completed")], host_waits=True), "its own kernel is stuck"


def hung(rank: int, part: str | None) -> HungRank:
    pending = collective("scheduled")
    groups = [GroupTrace("0", [0, 1, 2, 3], False, 4, [pending], pending)]
    device = None if part is None else DevicePosition(part, 12, 3, 45.0)
    return HungRank(rank, 11, "S", f"x.py:{rank} in f", True, "", "", groups, device)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        (["communication", "communication", "backward", "communication"], [2]),
        (["communication", "communication", "backward", None], [2]),
        (["communication"] * 4, []),  # the network
        (["backward"] * 4, []),
        ([None] * 4, []),
    ],
)
def test_without_start_events_the_gpu_that_still_computes_is_named(parts: list[str | None], named: list[int]) -> None:
    found = find_hang_culprits([hung(rank, part) for rank, part in enumerate(parts)])
    assert [culprit.rank for culprit in found] == named
    expected = "has a GPU that does not finish backward of micro-batch 3 of step 12, launched 45 s ago"
    assert all(culprit.why == expected for culprit in found)


def test_the_state_of_the_device_is_in_the_dump() -> None:
    def read(value: Any) -> Any:
        return read_device_state(json.dumps({"device": value}))

    state = read({"position": {"part": "loss", "step": 1, "micro_batch": 0, "seconds": 2.0}, "host_waits": True})
    assert (state.position, state.host_waits) == (DevicePosition("loss", 1, 0, 2.0), True)
    assert read_device_state(merge_dumps([], {}, 0, state).decode()) == state
    assert read("of another version").position is None
    assert read_device_state("").position is None


class Page(bytearray):
    """Counts assignments. ``struct.pack_into`` makes none: it fills the buffer with zeros, then with values."""

    assigned = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        self.assigned += 1
        super().__setitem__(key, value)


def test_a_heartbeat_is_written_at_once_and_never_reads_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = Heartbeat(None)
    page = Page(heartbeat._page[:])
    monkeypatch.setattr(heartbeat, "_page", page)
    heartbeat.record_phase(StartupPhase.STEPPED)
    heartbeat(12)
    heartbeat.ping()
    assert page.assigned == 3
    assert heartbeat.read().step == 12


def test_a_rank_of_a_previous_round_keeps_its_own_page(tmp_path: Path) -> None:
    first = create_heartbeat(tmp_path, 0)
    old_rank = Heartbeat(first.path)
    second = create_heartbeat(tmp_path, 0)
    old_rank(12)
    assert first.read().step == 12
    assert second.read().step == -1
