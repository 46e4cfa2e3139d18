"""Faults that pass: storage that fails or is slow for a while, memory and disks that others fill, a second launch."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

from tests.chaos.fault import Fault, hold_rank, hold_steps, node_fault
from tests.chaos.injections import LOCK_PATIENCE_VARIABLE, Injection
from tests.chaos.scenario import DIRECTORY_PLACEHOLDER, Scenario, expect_status
from tests.chaos.simulated_nodes import simulated_nodes
from tests.chaos.storage_faults import SMALL_DISK, SMALL_MEMORY, damage_then_kill, fill_disk, free_disk
from tests.chaos.workspace import NUM_RANKS
from zero2all.base.io import HISTORY_FILE

STORAGE = "storage"
ON_FAILING_STORAGE = (f"checkpoint.dir={DIRECTORY_PLACEHOLDER}/{STORAGE}",)
OUTAGE_SECONDS = 60.0
SLOW_WRITE_SECONDS = 4.0  # longer than the steps between two checkpoints take


class FailingStorage:
    """A directory below which every access fails while it is broken: a link that points at itself."""

    def __init__(self, scenario: Scenario) -> None:
        self._link = scenario.directory / STORAGE
        self._real = scenario.directory / f"{STORAGE}.real"
        self._real.mkdir()
        self._link.symlink_to(self._real)

    def break_down(self) -> None:
        self._point_to(self._link)

    def repair(self) -> None:
        self._point_to(self._real)

    def _point_to(self, target: Path) -> None:
        new = self._link.with_suffix(".new")
        new.symlink_to(target)
        new.replace(self._link)


def lose_storage_and_a_rank(scenario: Scenario) -> None:
    """A rank is killed while storage fails: the restart waits for it, and never begins from scratch."""
    storage = FailingStorage(scenario)
    process = scenario.start()
    pid = scenario.wait_until_triggered(0)
    scenario.wait_for_checkpoint()
    shutil.rmtree(scenario.flash_dir)  # or the restart would not need storage
    storage.break_down()
    scenario.mark_trigger()
    os.kill(pid, signal.SIGKILL)
    scenario.wait_for_message("storage cannot be read")
    storage.repair()
    expect_status(scenario.wait(process), 0)


def lose_storage_between_steps(scenario: Scenario) -> None:
    """From the first held step to the second, everything on storage fails; nothing else does."""
    storage = FailingStorage(scenario)
    scenario.run_broken(storage.break_down, storage.repair)


def fill_memory_then_kill(scenario: Scenario) -> None:
    """Another program fills the tmpfs of the slots, which exist by then; later a rank is killed."""
    with simulated_nodes(1) as [node]:
        node.mount_small_disk(SMALL_MEMORY, "64m")
        scenario.run_broken(lambda: fill_disk(node, SMALL_MEMORY), node=node)


def fill_disk_of_record(scenario: Scenario) -> None:
    """The disk of the run record alone is full from the first held step to the second, and a rank is killed then."""
    with simulated_nodes(1) as [node]:
        source = node.mount_small_disk(SMALL_DISK, "2m") / "record.jsonl"
        record = scenario.run_dir / source.name
        record.parent.mkdir(parents=True)
        record.symlink_to(SMALL_DISK / source.name)
        try:
            scenario.run_broken(lambda: fill_disk(node), lambda: free_disk(node), last=2, node=node)
        finally:  # a node's own file system ends with the node
            if source.exists():
                record.unlink()
                shutil.copyfile(source, record)


def launch_twice(scenario: Scenario) -> None:
    """While the job runs, the same command is started once more: it is refused, and the job does not notice."""
    first = scenario.start(hang_after=8 * scenario.hang_after)  # its ranks are held while the second starts
    scenario.wait_until_triggered(0)
    scenario.mark_trigger()
    scenario.environment[LOCK_PATIENCE_VARIABLE] = "1"
    expect_status(scenario.wait(scenario.start()), 2)
    scenario.release(0)
    expect_status(scenario.wait(first), 0)


def truncate_history(scenario: Scenario) -> None:
    path = scenario.run_dir / HISTORY_FILE
    os.truncate(path, path.stat().st_size // 2)


OUTAGE_FAULTS = (
    Fault(
        "storage fails for a while",
        hold_steps(6, 20),
        lose_storage_between_steps,
        ON_FAILING_STORAGE,
        expected_kind=None,
        expected_messages=("could not be written",),
    ),
    Fault(
        "a rank is killed while storage fails",
        hold_rank(),
        lose_storage_and_a_rank,
        ON_FAILING_STORAGE,
        expected_messages=("from durable storage",),
    ),
    Fault(
        "storage hangs for a minute",
        lambda rng: [Injection("pause", rng.randrange(NUM_RANKS), 8, "persist", seconds=OUTAGE_SECONDS)],
        expected_kind=None,
        expected_messages=("waiting for storage",),
    ),
    Fault(
        "storage slower than the interval",
        lambda rng: [
            Injection("pause", rng.randrange(NUM_RANKS), 0, "persist", times=4, seconds=SLOW_WRITE_SECONDS),
            Injection("kill", rng.randrange(NUM_RANKS), 21),
        ],
        expected_messages=("waiting for storage",),
    ),
    node_fault(
        "memory filled by another program",
        lambda rng: [Injection("hold", 0, 10), Injection("kill", rng.randrange(NUM_RANKS), 15)],
        fill_memory_then_kill,
        (f"checkpoint.flash_dir={SMALL_MEMORY}",),
        expected_messages=("cannot be kept in memory", "restored step 8"),
    ),
    node_fault(
        "full disk under the run record",
        # Its last page still takes a few lines: 17 steps are more than that.
        lambda rng: [
            Injection("hold", 0, 2),
            Injection("kill", rng.randrange(NUM_RANKS), 19),
            Injection("hold", 0, 21),
        ],
        fill_disk_of_record,
        ("checkpoint.every=24 steps",),  # a durable checkpoint is written even if the record then has a gap
        expected_messages=("its lines wait in memory", "the run record has not caught up with it"),
    ),
    Fault(
        "the same job is launched twice",
        hold_rank(),
        launch_twice,
        expected_kind=None,
        expected_messages=("another trainer works in",),
    ),
    Fault(
        "truncated history",
        hold_rank(),
        damage_then_kill(truncate_history),
        expected_messages=("decides which history",),
    ),
    Fault(
        "five kills, also during start, restore and writes",
        lambda rng: [
            Injection("kill", rng.randrange(NUM_RANKS), 8, "persist"),
            Injection("kill", rng.randrange(NUM_RANKS), -1, "start", after=0),
            Injection("kill", rng.randrange(NUM_RANKS), -1, "restore", after=1),
            Injection("kill", rng.randrange(NUM_RANKS), 13, "staging", after=2),
            Injection("kill", 0, 16, "manifest", after=3),
        ],
    ),
    Fault(
        "kill after a rollback",
        lambda rng: [
            Injection("corrupt", rng.randrange(NUM_RANKS), 13, "gradient"),
            Injection("kill", rng.randrange(NUM_RANKS), 13, after=0),
        ],
        overrides=("train.guard.policy=rollback",),
        expected_messages=("gradient norm nan", "with the same data"),
    ),
)
