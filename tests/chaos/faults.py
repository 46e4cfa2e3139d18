"""The faults of the suite: how each is injected, and what is expected of the job."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from tests.chaos.cgroup import cgroup_unavailable_reason
from tests.chaos.fault import (
    DURABLE_ONLY,
    ELASTIC_LOSS_TOLERANCE,
    Fault,
    Rng,
    elastic_fault,
    hold_rank,
    hold_steps,
    inject,
    node_fault,
    stop_and_resume,
)
from tests.chaos.injections import Injection
from tests.chaos.membership_faults import MEMBERSHIP_FAULTS
from tests.chaos.node_faults import (
    abandon_histories,
    disconnect_node,
    isolate_node,
    jump_clock,
    lose_node,
    lose_rendezvous_node,
    preempt_node,
    replace_node,
    replace_nodes_in_turn,
    restart_rendezvous,
    shrink_and_grow_nodes,
    suspend_node,
)
from tests.chaos.outage_faults import OUTAGE_FAULTS
from tests.chaos.random_histories import RANDOM_HISTORIES
from tests.chaos.scenario import Scenario, expect_status
from tests.chaos.storage_faults import (
    SMALL_DISK,
    SMALL_MEMORY,
    damage_then_kill,
    delete_flash_states,
    fill_disk,
    flip_checkpoint_bit,
    flip_flash_bit,
    free_disk,
    remount,
    remove_manifest,
    run_on_faulty_disk,
    run_under_memory_limit,
    run_with_small_shm,
    truncate_checkpoint,
)
from tests.chaos.workspace import NUM_RANKS
from zero2all.cluster.launch.launcher import RENDEZVOUS_ADVICE

MAX_STEPS_AGAIN = 8  # two intervals of flash checkpoints: of the newest a part may be on its way to another node
NO_DURABLE = ("checkpoint.every=100 steps",)
NO_REPLICAS = ("checkpoint.replicas=0",)  # a replica would restore the corrupted state, on the right history


def poisoned_history(*held_steps: int) -> Callable[[Rng], list[Injection]]:
    """A batch is corrupted before the first of the steps at which the job is held; its effect must not survive."""

    def injections(rng: Rng) -> list[Injection]:
        poisoned = [Injection("corrupt", rank, held_steps[0] - 2, where="batch") for rank in range(NUM_RANKS)]
        return [*(Injection("hold", 0, step) for step in held_steps), *poisoned]

    return injections


def send_signal_to_agent(number: signal.Signals) -> Callable[[Scenario], None]:
    def drive(scenario: Scenario) -> None:
        process = scenario.start()
        scenario.wait_until_triggered()
        ranks = scenario.rank_pids()
        scenario.mark_trigger()
        process.send_signal(number)
        if number != signal.SIGKILL:
            # Once a rank logs it, the agent has forwarded the signal; then the held rank may finish its step.
            scenario.wait_until(lambda: "stopping after this step" in scenario.log_text(), "the ranks have the signal")
            scenario.release()
        expect_status(scenario.wait(process), -signal.SIGKILL if number == signal.SIGKILL else 1)
        scenario.wait_until(lambda: not any(map(_is_alive, ranks.values())), "the ranks have ended with their agent")
        expect_status(scenario.run(), 0)

    return drive


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def change_rank_count(*rank_counts: int) -> Callable[[Scenario], None]:
    """Stopped and resumed with another number of ranks."""

    def drive(scenario: Scenario) -> None:
        for num_ranks in rank_counts[:-1]:
            expect_status(scenario.run(num_ranks), 1)
        expect_status(scenario.run(rank_counts[-1]), 0)

    return drive


SINGLE_NODE_FAULTS = (
    Fault("kill a rank", inject("kill")),
    Fault("kill the first rank", inject("kill", rank=0)),
    Fault("kill before the first checkpoint", inject("kill", first=1, last=3)),
    Fault("kill at the last step", inject("kill", first=23, last=24)),
    Fault("kill two ranks at once", lambda rng: [Injection("kill", rank, 11) for rank in (1, 2)]),
    Fault("kill three times", lambda rng: [Injection("kill", rng.randrange(NUM_RANKS), step) for step in (6, 11, 19)]),
    Fault("segmentation fault", inject("segfault"), expected_messages=("SIGSEGV (exit status 139)",)),
    Fault("abort in native code", inject("abort"), expected_messages=("SIGABRT (exit status 134)",)),
    Fault("bus error", inject("bus_error"), expected_messages=("SIGBUS (exit status 135)",)),
    Fault("a rank leaves without a word", inject("leave"), expected_messages=("exit status 7",)),
    Fault("a rank raises", inject("fail"), expected_messages=("ValueError: an injected fault", "injections.py")),
    Fault(
        "a rank raises at its start",
        inject("fail", where="start", first=-1, last=0),
        expected_messages=("before the first step",),
    ),
    *(
        Fault(name, inject(action), expected_kind="hang", expected_messages=messages)
        for name, action, messages in (
            ("a rank is stopped", "stop", ("is stopped (state T)",)),
            ("a rank loops", "loop", ("injections.py", "is not in the collective")),
            ("a rank hangs with Python's lock", "hold_the_lock", ("in hold_the_lock",)),
        )
    ),
    Fault("a rank wants too much memory", inject("want_memory"), expected_kind="out of memory"),
    Fault(
        "killed by the out-of-memory killer",
        inject("eat_memory"),
        run_under_memory_limit,
        expected_kind="out of memory",
        expected_messages=("killed by the kernel",),
        unavailable_reason=cgroup_unavailable_reason,
    ),
    Fault(
        "SIGTERM to a rank",
        inject("terminate"),
        stop_and_resume,
        expected_kind=None,
        expected_messages=("stopped: the same command",),
    ),
    *(
        Fault(name, hold_rank(), send_signal_to_agent(number), expected_kind=None, expected_messages=messages)
        for name, number, messages in (
            ("SIGTERM to the agent", signal.SIGTERM, ("told to leave",)),
            ("Ctrl-C", signal.SIGINT, ("stopped by the user",)),
            ("kill the agent", signal.SIGKILL, ()),
        )
    ),
    Fault(
        "one step fails three times",
        inject("fail", times=3),
        stop_and_resume,
        expected_messages=("given up: it failed 3 times after step",),
    ),
    Fault("kill while staging", inject("kill", where="staging"), expected_messages=("was not finished",)),
    Fault("kill between state and marker", inject("kill", where="marker"), expected_messages=("was not finished",)),
    Fault("kill while writing a checkpoint", inject("kill", where="persist", first=8, last=9), overrides=DURABLE_ONLY),
    Fault(
        "kill between data and manifest",
        inject("kill", where="manifest", first=8, last=9, rank=0),
        overrides=DURABLE_ONLY,
    ),
    *(
        Fault(name, hold_rank(), damage_then_kill(damage), DURABLE_ONLY, expected_messages=(message,))
        for name, damage, message in (
            ("truncated checkpoint", truncate_checkpoint, "is skipped"),
            ("bit flipped in a checkpoint", flip_checkpoint_bit, "does not match"),
            ("checkpoint without a manifest", remove_manifest, "is skipped"),
        )
    ),
    Fault(
        "bit flipped in memory", hold_rank(), damage_then_kill(flip_flash_bit), expected_messages=("does not match",)
    ),
    Fault("memory lost, as after a reboot", hold_rank(), damage_then_kill(delete_flash_states)),
    *(
        node_fault(
            name,
            hold_steps(10, 20),
            run_on_faulty_disk(broken, repaired),
            (f"checkpoint.dir={SMALL_DISK}", *DURABLE_ONLY),
            expected_kind=None,
            expected_messages=("could not be written",),
        )
        for name, broken, repaired in (
            ("full disk", fill_disk, free_disk),
            ("read-only disk", remount("ro"), remount("rw")),
        )
    ),
    node_fault(
        "no room for states in memory",
        inject("kill"),
        run_with_small_shm,
        (f"checkpoint.flash_dir={SMALL_MEMORY}",),
        expected_messages=("from durable storage",),
    ),
    Fault(
        "NaN in a gradient",
        inject("corrupt", where="gradient"),
        overrides=("train.guard.policy=rollback",),
        expected_kind=None,
        expected_messages=("gradient norm nan", "with the same data"),
    ),
    Fault(
        "poisoned batch",
        lambda rng: [Injection("corrupt", rank, 40, where="batch") for rank in range(NUM_RANKS)],
        overrides=("train.guard.policy=rollback", "train.steps=56"),
        expected_kind=None,
        expected_messages=("expected about", "skipping steps"),
    ),
    Fault(
        "bit flipped in one copy of the weights",
        inject("corrupt", where="weights"),
        overrides=("parallel={dp_replicate: 4, dp_shard: 1}",),
        expected_messages=("copies of the model differ", "unlike on the 3 others"),
    ),
    *(
        Fault(name, injected, change_rank_count(*counts), expected_kind=None, loss_tolerance=ELASTIC_LOSS_TOLERANCE)
        for name, injected, counts in (
            ("3 ranks instead of 4", inject("terminate"), (4, 3)),
            ("4, then 2, then 1 rank", lambda rng: [Injection("terminate", 0, step) for step in (7, 15)], (4, 2, 1)),
        )
    ),
)
MULTI_NODE_FAULTS = (
    elastic_fault("a node is lost for good", hold_rank(rank=1), lose_node(1)),
    elastic_fault("the node of the first rank is lost", hold_rank(rank=1), lose_node(0)),
    elastic_fault(
        "a node is lost and comes back",
        lambda rng: [Injection("hold", 1, 9), Injection("hold", 0, 14)],
        lose_node(1, back=True),
    ),
    node_fault(
        "a node is replaced",
        hold_rank(rank=1),
        replace_node,
        NO_DURABLE,
        expected_kind="cut off",
        expected_messages=("2 parts copied from other nodes",),
        max_steps_again=MAX_STEPS_AGAIN,
    ),
    node_fault(
        "two nodes are replaced, one after the other",
        lambda rng: [Injection("hold", 1, 13), Injection("hold", 3, 19)],
        replace_nodes_in_turn,
        NO_DURABLE,
        expected_kind="cut off",
        expected_messages=("2 parts copied from other nodes",),
        max_steps_again=2 * MAX_STEPS_AGAIN,
    ),
    elastic_fault(
        "a node is cut off",
        hold_rank(rank=1),
        disconnect_node,
        accepted_kinds=("hang",),
    ),
    elastic_fault(
        "a node is told to leave",
        hold_rank(rank=1),
        preempt_node,
        expected_kind=None,
        accepted_kinds=("cut off",),
    ),
    node_fault(
        "the rendezvous is restarted",
        hold_rank(rank=1),
        restart_rendezvous,
        expected_kind=None,
        accepted_kinds=("cut off",),
    ),
    node_fault(
        "the node that holds the rendezvous is lost",
        hold_rank(rank=1),
        lose_rendezvous_node,
        expected_kind=None,
        accepted_kinds=("cut off",),
        expected_messages=(RENDEZVOUS_ADVICE,),
    ),
    node_fault(
        "nodes A and B, then A and C, then A and B",
        poisoned_history(13, 14),
        abandon_histories,
        NO_REPLICAS,
        expected_kind=None,
    ),
    elastic_fault(
        "2 nodes, then 1, then 2",
        poisoned_history(13, 14),
        shrink_and_grow_nodes,
        NO_REPLICAS,
        expected_kind=None,
    ),
    node_fault(
        "a node is replaced by a new one",
        hold_rank(rank=1),
        lambda scenario: replace_node(scenario, by=2),
        NO_DURABLE,
        expected_kind="cut off",
        expected_messages=("2 parts copied from other nodes",),
    ),
    node_fault(
        "a node is replaced by a new one, without replicas",
        hold_rank(rank=1),
        lambda scenario: replace_node(scenario, replicas=False, by=2),
        NO_REPLICAS,
        expected_kind="cut off",
        expected_messages=("from durable storage",),
    ),
    elastic_fault(
        "a node returns with abandoned states",
        # It returns while the other has not yet reached the step of those states again; they hold a corrupted batch.
        lambda rng: [
            Injection("hold", 1, 13),
            Injection("hold", 0, 10, after=0),
            *(Injection("corrupt", rank, 11, "batch") for rank in range(NUM_RANKS)),
        ],
        isolate_node,
        NO_REPLICAS,
        expected_messages=("of an abandoned history",),
    ),
    elastic_fault(
        "a node is suspended and wakes up replaced",
        lambda rng: [Injection("hold", 1, 9), Injection("hold", 0, 18)],
        suspend_node,
        accepted_kinds=("hang",),
    ),
    node_fault(
        "the clock of a node jumps",
        lambda rng: [Injection("hold", 0, 6), Injection("hold", 0, 14), Injection("kill", 0, 20)],
        jump_clock,
        accepted_kinds=("cut off",),
        expected_messages=("first to fail: rank 0",),
    ),
)
FAULTS: tuple[Fault, ...] = (
    *SINGLE_NODE_FAULTS,
    *OUTAGE_FAULTS,
    *MULTI_NODE_FAULTS,
    *MEMBERSHIP_FAULTS,
    *RANDOM_HISTORIES,
)
