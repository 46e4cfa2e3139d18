"""Random histories: a seeded sequence of failures of ranks, nodes and storage, whatever the order.

Three nodes, of which one or two run the job at a time. At each held step something happens, and the job continues on
nodes drawn again, with what their memory holds. Which state is right to restore follows from nothing but what happened,
and the audits know no more than that: every loss, every sample and every restored state must be right at the end.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.chaos.fault import ELASTIC_LOSS_TOLERANCE, Fault, Rng, node_fault
from tests.chaos.injections import Injection
from tests.chaos.node_faults import (
    RANKS_PER_NODE,
    SAVING_MESSAGE,
    NodeProcess,
    SimulatedCluster,
    simulated_cluster,
)
from tests.chaos.outage_faults import ON_FAILING_STORAGE, FailingStorage
from tests.chaos.scenario import Scenario

NUM_NODES, NUM_EVENTS = 3, 5
LAST_STEP = 22
UNWRITTEN_MESSAGE = "could not be written"
EventKind = Literal["kill a rank", "kill the job", "power failure", "told to stop", "storage fails"]
ENDING_EVENTS: tuple[EventKind, ...] = ("kill the job", "power failure", "told to stop")
EVENTS: tuple[EventKind, ...] = ("kill a rank", "storage fails", *ENDING_EVENTS)


@dataclass(frozen=True)
class Event:
    """What happens while the job is held at a step, and the nodes that run it from then on."""

    kind: EventKind
    step: int
    nodes: tuple[int, ...]
    next_nodes: tuple[int, ...]
    chosen: int
    """The rank or node that it happens to, counted from 0."""


def draw_history(seed: int) -> list[Event]:
    """Held steps increase: the state that is restored is never beyond the next of them."""
    rng = random.Random(seed)
    steps = sorted(rng.sample(range(5, LAST_STEP), NUM_EVENTS))
    nodes: tuple[int, ...] = (0, 1)
    events = []
    for step in steps:
        # Not last of all: a job whose final checkpoint cannot be written fails.
        kind = rng.choice(EVENTS if step != steps[-1] else ("kill a rank", *ENDING_EVENTS))
        next_nodes = _draw_nodes(rng) if kind in ENDING_EVENTS else nodes
        chosen = rng.randrange(len(nodes) * (RANKS_PER_NODE if kind == "kill a rank" else 1))
        events.append(Event(kind, step, nodes, next_nodes, chosen))
        nodes = next_nodes
    return events


def _draw_nodes(rng: Rng) -> tuple[int, ...]:
    """Mostly two: with one node the number of ranks changes, and losses are only nearly equal."""
    return tuple(sorted(rng.sample(range(NUM_NODES), 1 if rng.random() < 0.2 else 2)))


def random_history(seed: int) -> Fault:
    events = draw_history(seed)
    rank_count_changes = any(len(event.next_nodes) == 1 for event in events)
    return node_fault(
        f"random history {seed}",
        lambda rng: [
            *(Injection("hold", 0, event.step) for event in events),
            Injection("corrupt", 0, rng.randrange(6, LAST_STEP), "gradient"),  # a rollback, with the same data
        ],
        drive_history(events),
        (*ON_FAILING_STORAGE, "train.guard.policy=rollback"),
        expected_kind=None,
        accepted_kinds=("crash", "cut off"),
        loss_tolerance=ELASTIC_LOSS_TOLERANCE if rank_count_changes else 0.0,
    )


def drive_history(events: list[Event]) -> Callable[[Scenario], None]:
    def drive(scenario: Scenario) -> None:
        storage = FailingStorage(scenario)
        with simulated_cluster(scenario, nodes=NUM_NODES) as cluster:
            cluster.start_rendezvous()
            processes = _start(cluster, events[0].nodes)
            for number, event in enumerate(events):
                scenario.wait_until_triggered(number)
                if number == 0:
                    scenario.mark_trigger()
                _happen(event, number, cluster, storage, processes)
                if event.kind in ENDING_EVENTS:
                    processes = _start(cluster, event.next_nodes)
            cluster.expect_success(*processes)

    return drive


def _start(cluster: SimulatedCluster, nodes: tuple[int, ...]) -> list[NodeProcess]:
    return [cluster.start(node, nodes=(len(nodes), len(nodes))) for node in nodes]


def _happen(
    event: Event, number: int, cluster: SimulatedCluster, storage: FailingStorage, processes: list[NodeProcess]
) -> None:
    scenario = cluster.scenario
    if event.kind == "kill a rank":
        os.kill(scenario.rank_pids()[event.chosen], signal.SIGKILL)
        scenario.release(number)
    elif event.kind == "storage fails":
        failed, reports = scenario.log_text().count(UNWRITTEN_MESSAGE), len(scenario.reports())
        storage.break_down()
        scenario.release(number)
        scenario.wait_until(
            lambda: (
                scenario.log_text().count(UNWRITTEN_MESSAGE) > failed
                or len(scenario.reports()) > reports
                or scenario.is_triggered(number + 1)
                or all(process.poll() is not None for process in processes)
            ),
            "a checkpoint fails, or none is due before the next event",
        )
        storage.repair()
    elif event.kind == "told to stop":
        told = scenario.log_text().count(SAVING_MESSAGE)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        scenario.wait_for_message(SAVING_MESSAGE, told + len(processes))
        scenario.release(number)
    else:
        if event.kind == "power failure":
            cluster.power_cycle(event.nodes[event.chosen])
        for node in event.nodes:
            cluster.nodes[node].kill_all()
    if event.kind in ENDING_EVENTS:
        for process in processes:
            process.wait(scenario.timeout)


RANDOM_HISTORIES = tuple(random_history(seed) for seed in (3, 8, 18))
