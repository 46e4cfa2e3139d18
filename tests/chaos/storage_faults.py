"""Faults of disk and memory: damaged checkpoints, full and read-only disks, lost or too little memory."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.chaos.cgroup import memory_limit
from tests.chaos.scenario import Scenario, expect_status
from tests.chaos.simulated_nodes import NODE_TMPDIR, SimulatedNode, simulated_nodes
from zero2all.checkpoint.staged_slot import find_staged_slots

SMALL_DISK, SMALL_MEMORY = NODE_TMPDIR / "disk", NODE_TMPDIR / "memory"  # small file systems of a simulated node


def damage_then_kill(damage: Callable[[Scenario], None]) -> Callable[[Scenario], None]:
    """While a rank is held, damage a checkpoint, then kill the rank."""

    def drive(scenario: Scenario) -> None:
        process = scenario.start()
        pid = scenario.wait_until_triggered()
        damage(scenario)
        scenario.mark_trigger()
        os.kill(pid, signal.SIGKILL)
        expect_status(scenario.wait(process), 0)

    return drive


def newest_checkpoint(scenario: Scenario) -> Path:
    """Once it is complete: it is written in the background."""
    run = scenario.open_run()
    scenario.wait_for_checkpoint()
    return run.checkpoints.path(run.checkpoints.steps()[-1])


def largest_file(directory: Path) -> Path:
    return max((path for path in directory.iterdir() if path.suffix == ".distcp"), key=lambda path: path.stat().st_size)


def truncate_checkpoint(scenario: Scenario) -> None:
    path = largest_file(newest_checkpoint(scenario))
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(path: Path) -> None:
    with open(path, "r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


def flip_checkpoint_bit(scenario: Scenario) -> None:
    flip_bit(largest_file(newest_checkpoint(scenario)))


def remove_manifest(scenario: Scenario) -> None:
    (newest_checkpoint(scenario) / "manifest.json").unlink()


def flip_flash_bit(scenario: Scenario) -> None:
    slots = [slot for slot in find_staged_slots(scenario.flash_dir) if slot.rank == 1 and slot.header.hash is not None]
    flip_bit(max(slots, key=lambda slot: slot.header.step).data)


def delete_flash_states(scenario: Scenario) -> None:
    shutil.rmtree(scenario.flash_dir)


def run_with_small_shm(scenario: Scenario) -> None:
    with simulated_nodes(1) as [node]:
        node.mount_small_disk(SMALL_MEMORY, "64k")
        expect_status(scenario.run(node=node), 0)


def run_on_faulty_disk(
    break_disk: Callable[[SimulatedNode], None], repair_disk: Callable[[SimulatedNode], None]
) -> Callable[[Scenario], None]:
    """From the first held step to the second, the disk of the checkpoints is faulty."""

    def drive(scenario: Scenario) -> None:
        with simulated_nodes(1) as [node]:
            node.mount_small_disk(SMALL_DISK, "64m")
            scenario.run_broken(lambda: break_disk(node), lambda: repair_disk(node), node=node)

    return drive


def fill_disk(node: SimulatedNode, disk: Path = SMALL_DISK) -> None:
    with open(node.path(disk) / "filler", "wb", buffering=0) as stream, suppress(OSError):
        while True:  # unbuffered: nothing is left that closing the file would write, and fail
            stream.write(bytes(1 << 20))


def free_disk(node: SimulatedNode) -> None:
    (node.path(SMALL_DISK) / "filler").unlink()


def remount(how: str) -> Callable[[SimulatedNode], None]:
    def act(node: SimulatedNode) -> None:
        node.run("mount", "-o", f"remount,{how}", str(SMALL_DISK))

    return act


def run_under_memory_limit(scenario: Scenario) -> None:
    with memory_limit(scenario.directory.name, 4 << 30) as join:
        process = scenario.start()
        join(process.pid)
        expect_status(scenario.wait(process), 0)
