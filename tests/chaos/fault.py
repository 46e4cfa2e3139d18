"""What a fault of the suite is: how it is injected, and what is expected of the job."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.chaos.injections import Injection, InjectionPoint
from tests.chaos.scenario import Scenario, expect_status
from tests.chaos.simulated_nodes import simulation_unavailable_reason
from tests.chaos.workspace import NUM_RANKS
from zero2all.cluster.launch.exit_reason import FailureKind

Rng = random.Random
DURABLE_ONLY = ("checkpoint.flash_every=null",)
ELASTIC_LOSS_TOLERANCE = 1e-5  # where the number of ranks changes


@dataclass(frozen=True)
class Fault:
    """``injections`` act inside ranks; ``drive`` starts the job, acts from outside, and returns when it has ended."""

    name: str
    injections: Callable[[Rng], list[Injection]] = lambda rng: []
    drive: Callable[[Scenario], None] = lambda scenario: run_to_completion(scenario)
    overrides: tuple[str, ...] = ()
    expected_kind: FailureKind | None = "crash"
    """The kind in the failure report; None if there must be no report."""
    accepted_kinds: tuple[FailureKind, ...] = ()
    """Other kinds that a node may report that sees only the consequences."""
    expected_messages: tuple[str, ...] = ()
    """Messages that the log must contain."""
    loss_tolerance: float = 0.0
    """Largest difference of a loss from the baseline's; 0 is bit for bit."""
    max_steps_again: int | None = None
    """Most steps that may be repeated, if less than all: a bound that only states in memory can keep."""
    unavailable_reason: Callable[[], str | None] = lambda: None
    """Why it cannot be injected here, if so."""


node_fault = partial(Fault, unavailable_reason=simulation_unavailable_reason)
elastic_fault = partial(node_fault, expected_kind="cut off", loss_tolerance=ELASTIC_LOSS_TOLERANCE)


def run_to_completion(scenario: Scenario) -> None:
    """The job recovers and completes without help."""
    expect_status(scenario.run(), 0)


def stop_and_resume(scenario: Scenario) -> None:
    """The job stops, and the same command resumes it."""
    expect_status(scenario.run(), 1)
    expect_status(scenario.run(), 0)


def inject(
    action: str,
    *,
    first: int = 9,
    last: int = 22,
    rank: int | None = None,
    where: InjectionPoint = "step",
    times: int = 1,
) -> Callable[[Rng], list[Injection]]:
    """One injection at a random rank and step."""

    def injections(rng: Rng) -> list[Injection]:
        chosen = rng.randrange(NUM_RANKS) if rank is None else rank
        return [Injection(action, chosen, rng.randrange(first, last), where, times)]

    return injections


def hold_steps(first: int, last: int) -> Callable[[Rng], list[Injection]]:
    return lambda rng: [Injection("hold", 0, step) for step in (first, last)]


def hold_rank(rank: int = 0, step: int = 13) -> Callable[[Rng], list[Injection]]:
    return lambda rng: [Injection("hold", rank, step)]
