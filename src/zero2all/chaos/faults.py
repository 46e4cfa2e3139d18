"""The faults of the suite: how each is caused, and what is expected of the job."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zero2all.chaos.limits import memory_limit, why_no_memory_limit
from zero2all.chaos.machines import TEMPORARY, Machine, some_machines, why_not
from zero2all.chaos.nodes import (
    cut_cable,
    fewer_and_more_nodes,
    lose_node,
    lose_the_holder,
    other_histories,
    preempt_node,
    restart_rendezvous,
)
from zero2all.chaos.plants import Plant, Where
from zero2all.chaos.scene import Scene
from zero2all.chaos.world import PROCS
from zero2all.errors import Z2aError
from zero2all.resilience.exits import Kind
from zero2all.resilience.flash import staged_in

Dice = random.Random
DURABLE_ONLY = ("checkpoint.flash_every=null",)
CLOSE = 1e-5  # of losses, where the number of ranks changes
SMALL_DISK, SMALL_MEMORY = TEMPORARY / "disk", TEMPORARY / "memory"  # of a machine: file systems with little room


@dataclass(frozen=True)
class Fault:
    """``plants`` are laid into ranks; ``drive`` starts the job, acts from outside, and returns when it has ended."""

    name: str
    plants: Callable[[Dice], list[Plant]] = lambda dice: []
    drive: Callable[[Scene], None] = lambda scene: once(scene)
    overrides: tuple[str, ...] = ()
    kind: Kind | None = "crash"
    """What the failure report calls it; None where there is nothing to report."""
    also: tuple[Kind, ...] = ()
    """What it may be called as well, on a node that sees only the consequences."""
    says: tuple[str, ...] = ()
    """What a person must have been told."""
    within: float = 0.0
    """How far a loss may be from the undisturbed run's: 0 is to the last bit."""
    why_not: Callable[[], str | None] = lambda: None
    """Why it cannot be caused here, if so."""


def once(scene: Scene) -> None:
    """The job ends by itself."""
    expect(scene.run(), 0)


def twice(scene: Scene) -> None:
    """The job is stopped, and the same command goes on."""
    expect(scene.run(), 1)
    expect(scene.run(), 0)


def expect(status: int, wanted: int) -> None:
    if status != wanted:
        raise Z2aError(f"the job ended with status {status}, not {wanted}")


def at(
    act: str, *, first: int = 9, last: int = 22, rank: int | None = None, where: Where = "step", times: int = 1
) -> Callable[[Dice], list[Plant]]:
    """One plant at a random rank and step."""

    def plants(dice: Dice) -> list[Plant]:
        chosen = dice.randrange(PROCS) if rank is None else rank
        return [Plant(act, chosen, dice.randrange(first, last), where, times)]

    return plants


def wrong_history(*held: int) -> Callable[[Dice], list[Plant]]:
    """A batch is spoiled before the first of these steps, at which the job is held; none of it may be seen later."""

    def plants(dice: Dice) -> list[Plant]:
        spoiled = [Plant("spoil", rank, held[0] - 2, where="batch") for rank in range(PROCS)]
        return [*(Plant("hold", 0, step) for step in held), *spoiled]

    return plants


def signal_to_agent(number: signal.Signals) -> Callable[[Scene], None]:
    def drive(scene: Scene) -> None:
        process = scene.start()
        scene.until_struck()
        ranks = scene.rank_pids()
        scene.strike()
        process.send_signal(number)
        if number != signal.SIGKILL:
            # The agent has passed it on once a rank says so; then the held rank may finish its step.
            scene.until(lambda: "stopping after this step" in scene.said(), "the ranks were told")
            scene.let_go()
        expect(scene.wait(process), -signal.SIGKILL if number == signal.SIGKILL else 1)
        scene.until(lambda: not any(map(_alive, ranks.values())), "the ranks have ended with their agent")
        expect(scene.run(), 0)

    return drive


def spoil(how: Callable[[Scene], None]) -> Callable[[Scene], None]:
    """While a rank waits, do something to what is kept, then kill it."""

    def drive(scene: Scene) -> None:
        process = scene.start()
        pid = scene.until_struck()
        how(scene)
        scene.strike()
        os.kill(pid, signal.SIGKILL)
        expect(scene.wait(process), 0)

    return drive


def newest_checkpoint(scene: Scene) -> Path:
    """Once it is whole: it is written in the background."""
    run = scene.open()
    scene.until(lambda: run.checkpoints.newest() is not None, "there is a checkpoint")
    return run.checkpoints.path(run.checkpoints.steps()[-1])


def largest_file(directory: Path) -> Path:
    return max((path for path in directory.iterdir() if path.suffix == ".distcp"), key=lambda path: path.stat().st_size)


def truncate_checkpoint(scene: Scene) -> None:
    path = largest_file(newest_checkpoint(scene))
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(path: Path) -> None:
    with open(path, "r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


def flip_checkpoint_bit(scene: Scene) -> None:
    flip_bit(largest_file(newest_checkpoint(scene)))


def remove_manifest(scene: Scene) -> None:
    (newest_checkpoint(scene) / "manifest.json").unlink()


def flip_staged_bit(scene: Scene) -> None:
    slots = [slot for slot in staged_in(scene.memory) if slot.rank == 1 and slot.hash is not None]
    flip_bit(max(slots, key=lambda slot: slot.step).data)


def lose_memory(scene: Scene) -> None:
    shutil.rmtree(scene.memory)


def between(first: int, last: int) -> Callable[[Dice], list[Plant]]:
    return lambda dice: [Plant("hold", 0, step) for step in (first, last)]


def on_small_memory(scene: Scene) -> None:
    with some_machines(1) as [machine]:
        machine.small_disk(SMALL_MEMORY, "64k")
        expect(scene.run(machine=machine), 0)


def held(rank: int = 0, step: int = 13) -> Callable[[Dice], list[Plant]]:
    return lambda dice: [Plant("hold", rank, step)]


def while_disk(spoil: Callable[[Machine], None], mend: Callable[[Machine], None]) -> Callable[[Scene], None]:
    """From the first held step to the second, checkpoints have a disk that something is wrong with."""

    def drive(scene: Scene) -> None:
        with some_machines(1) as [machine]:
            machine.small_disk(SMALL_DISK, "64m")
            process = scene.start(machine=machine)
            scene.until_struck(0)
            spoil(machine)
            scene.strike()
            scene.let_go(0)
            scene.until_struck(1)
            mend(machine)
            scene.let_go(1)
            expect(scene.wait(process), 0)

    return drive


def fill(machine: Machine) -> None:
    with open(machine.path(SMALL_DISK) / "filler", "wb") as stream, suppress(OSError):
        while True:
            stream.write(bytes(1 << 20))


def make_room(machine: Machine) -> None:
    (machine.path(SMALL_DISK) / "filler").unlink()


def remount(how: str) -> Callable[[Machine], None]:
    def act(machine: Machine) -> None:
        machine.run("mount", "-o", f"remount,{how}", str(SMALL_DISK))

    return act


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def other_numbers(*numbers: int) -> Callable[[Scene], None]:
    """Stopped and taken up with other numbers of ranks."""

    def drive(scene: Scene) -> None:
        for procs in numbers[:-1]:
            expect(scene.run(procs), 1)
        expect(scene.run(numbers[-1]), 0)

    return drive


def limited_memory(scene: Scene) -> None:
    with memory_limit(scene.directory.name, 4 << 30) as join:
        process = scene.start()
        join(process.pid)
        expect(scene.wait(process), 0)


ON_ONE_MACHINE = (
    Fault("kill a rank", at("kill")),
    Fault("kill the first rank", at("kill", rank=0)),
    Fault("kill before the first checkpoint", at("kill", first=1, last=3)),
    Fault("kill at the last step", at("kill", first=23, last=24)),
    Fault("kill two ranks at once", lambda dice: [Plant("kill", rank, 11) for rank in (1, 2)]),
    Fault("kill three times", lambda dice: [Plant("kill", dice.randrange(PROCS), step) for step in (6, 11, 19)]),
    Fault("segmentation fault", at("segfault"), says=("SIGSEGV (exit status 139)",)),
    Fault("abort in native code", at("abort"), says=("SIGABRT (exit status 134)",)),
    Fault("bus error", at("bus_error"), says=("SIGBUS (exit status 135)",)),
    Fault("a rank leaves without a word", at("leave"), says=("exit status 7",)),
    Fault("a rank raises", at("fail"), says=("ValueError: a fault made on purpose", "plants.py")),
    Fault("a rank raises at its start", at("fail", where="start", first=-1, last=0), says=("before the first step",)),
    Fault("a rank is stopped", at("stop"), kind="hang", says=("is stopped (state T)",)),
    Fault("a rank loops", at("loop"), kind="hang", says=("plants.py", "is not in the collective")),
    Fault("a rank hangs with Python's lock", at("hold_the_lock"), kind="hang", says=("in hold_the_lock",)),
    Fault("a rank wants too much memory", at("want_memory"), kind="out of memory"),
    Fault(
        "killed for want of memory",
        at("eat_memory"),
        limited_memory,
        kind="out of memory",
        says=("killed by the kernel",),
        why_not=why_no_memory_limit,
    ),
    Fault("SIGTERM to a rank", at("terminate"), twice, kind=None, says=("stopped: the same command",)),
    Fault("SIGTERM to the agent", held(), signal_to_agent(signal.SIGTERM), kind=None, says=("told to leave",)),
    Fault("Ctrl-C", held(), signal_to_agent(signal.SIGINT), kind=None, says=("stopped by the user",)),
    Fault("kill the agent", held(), signal_to_agent(signal.SIGKILL), kind=None),
    Fault("one step fails three times", at("fail", times=3), twice, says=("given up: it failed 3 times after step",)),
    Fault("kill while staging", at("kill", where="staging"), says=("was not finished",)),
    Fault("kill between state and marker", at("kill", where="marker"), says=("was not finished",)),
    Fault("kill while writing a checkpoint", at("kill", where="persist", first=8, last=9), overrides=DURABLE_ONLY),
    Fault(
        "kill between data and manifest",
        at("kill", where="manifest", first=8, last=9, rank=0),
        overrides=DURABLE_ONLY,
    ),
    Fault("truncated checkpoint", held(), spoil(truncate_checkpoint), DURABLE_ONLY, says=("is skipped",)),
    Fault("bit flipped in a checkpoint", held(), spoil(flip_checkpoint_bit), DURABLE_ONLY, says=("does not match",)),
    Fault("checkpoint without a manifest", held(), spoil(remove_manifest), DURABLE_ONLY, says=("is skipped",)),
    Fault("bit flipped in memory", held(), spoil(flip_staged_bit), says=("does not match",)),
    Fault("memory lost, as after a reboot", held(), spoil(lose_memory)),
    Fault(
        "full disk",
        between(10, 20),
        while_disk(fill, make_room),
        (f"checkpoint.dir={SMALL_DISK}", *DURABLE_ONLY),
        kind=None,
        says=("could not be written",),
        why_not=why_not,
    ),
    Fault(
        "read-only disk",
        between(10, 20),
        while_disk(remount("ro"), remount("rw")),
        (f"checkpoint.dir={SMALL_DISK}", *DURABLE_ONLY),
        kind=None,
        says=("could not be written",),
        why_not=why_not,
    ),
    Fault(
        "no room for states in memory",
        at("kill"),
        on_small_memory,
        (f"checkpoint.flash_dir={SMALL_MEMORY}",),
        says=("from durable storage",),
        why_not=why_not,
    ),
    Fault(
        "NaN in a gradient",
        at("spoil", where="gradient"),
        overrides=("train.guard.policy=rollback",),
        kind=None,
        says=("gradient norm nan", "with the same data"),
    ),
    Fault(
        "poisoned batch",
        lambda dice: [Plant("spoil", rank, 40, where="batch") for rank in range(PROCS)],
        overrides=("train.guard.policy=rollback", "train.steps=56"),
        kind=None,
        says=("was to be expected", "passing over steps"),
    ),
    Fault(
        "bit flipped in one copy of the weights",
        at("spoil", where="weights"),
        overrides=("parallel={dp_replicate: 4, dp_shard: 1}",),
        says=("copies of the model differ", "unlike on the 3 others"),
    ),
    Fault("3 ranks instead of 4", at("terminate"), other_numbers(4, 3), kind=None, within=CLOSE),
    Fault(
        "4, then 2, then 1 rank",
        lambda dice: [Plant("terminate", 0, step) for step in (7, 15)],
        other_numbers(4, 2, 1),
        kind=None,
        within=CLOSE,
    ),
)
ON_MACHINES = (
    Fault("a node is lost for good", held(rank=1), lose_node(1), kind="cut off", within=CLOSE, why_not=why_not),
    Fault(
        "the node of the first rank is lost", held(rank=1), lose_node(0), kind="cut off", within=CLOSE, why_not=why_not
    ),
    Fault(
        "a node is lost and comes back",
        lambda dice: [Plant("hold", 1, 9), Plant("hold", 0, 14)],
        lose_node(1, back=True),
        kind="cut off",
        within=CLOSE,
        why_not=why_not,
    ),
    Fault("a node is cut off", held(rank=1), cut_cable, kind="cut off", also=("hang",), within=CLOSE, why_not=why_not),
    Fault(
        "a node is told to leave",
        held(rank=1),
        preempt_node,
        kind=None,
        also=("cut off",),
        within=CLOSE,
        why_not=why_not,
    ),
    Fault(
        "the rendezvous is started anew",
        held(rank=1),
        restart_rendezvous,
        kind=None,
        also=("cut off",),
        why_not=why_not,
    ),
    Fault(
        "the node that holds the rendezvous is lost",
        held(rank=1),
        lose_the_holder,
        kind=None,
        also=("cut off",),
        says=("'z2a rendezvous' on a machine that stays",),
        why_not=why_not,
    ),
    Fault(
        "nodes A and B, then A and C, then A and B",
        wrong_history(13, 14),
        other_histories,
        kind=None,
        why_not=why_not,
    ),
    Fault(
        "2 nodes, then 1, then 2",
        wrong_history(13, 14),
        fewer_and_more_nodes,
        kind=None,
        within=CLOSE,
        why_not=why_not,
    ),
)
FAULTS: tuple[Fault, ...] = (*ON_ONE_MACHINE, *ON_MACHINES)
