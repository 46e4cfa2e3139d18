"""Which islands take part in an exchange: decisions without sockets, threads or clocks of their own.

An exchange has two phases. When all islands that train have offered their part, they are its members. When all members
have received all parts, it is complete, and only then any of them uses it. A member that is lost before that, or that
cannot be reached, is left out of the next attempt. An island that is not there when an exchange completes may not
continue with its own state: it waits, and takes the state of a member after the next exchange.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from zero2all.base.errors import UsageError
from zero2all.cluster.launch.islands.messages import (
    Addresses,
    EnterIslands,
    IslandAnswer,
    OutcomeAnswer,
    QuorumAnswer,
    ReadyToExchange,
    ReportExchange,
    StartAnswer,
    StartIsland,
)

SILENT_AFTER = 8.0  # seconds without a heartbeat after which an island is lost
EXCHANGE_PATIENCE = 600.0  # seconds that the others wait for an island that is alive but does not come
MAX_BLAME = 3  # attempts that fail because of the same island, before it is left out

Role = Literal["entered", "starting", "training"]


class IslandTakenError(Exception):
    """Another process is this island."""


@dataclass(eq=False)
class Island:
    number: int
    addresses: Addresses
    last_heard: float
    patience: float
    role: Role = "entered"
    since: float = 0.0
    """When its request came."""
    start: StartIsland | None = None
    ready: ReadyToExchange | None = None
    report: ReportExchange | None = None
    answer: IslandAnswer | UsageError | None = None
    """The answer to the request that waits."""
    is_out_of_reach: bool = False
    """It is alive, but others could not receive its part several times."""

    def answer_with(self, answer: IslandAnswer | UsageError) -> None:
        self.start = self.ready = self.report = None
        self.answer = answer


@dataclass(eq=False)
class Attempt:
    exchange: int
    number: int
    members: list[Island]


@dataclass
class IslandQuorum:
    """
    >>> quorum = IslandQuorum(islands=2, identity={"recipe": "a1"})
    >>> island = quorum.enter(EnterIslands("run", 0, 2, {"recipe": "a1"}, [("10.0.0.1", 4000)], patience=60), now=0.0)
    >>> quorum.start(island, StartIsland(exchange=-1, digest="d"), now=0.0)
    >>> quorum.advance(now=61.0)
    >>> island.answer
    StartAnswer(exchange=-1, source=None, addresses=[], recipients=[], present=[0])
    """

    islands: int
    identity: dict[str, str]
    present: dict[int, Island] = field(default_factory=dict)
    last: int | None = None
    """The last exchange that was completed, if that is known."""
    is_done: bool = False
    """Whether an island has trained all steps."""
    _attempt: Attempt | None = None
    _attempts: int = 0
    _blame: Counter[int] = field(default_factory=Counter)
    """Attempts that failed because of an island."""

    def enter(self, request: EnterIslands, now: float) -> Island:
        if not 0 <= request.island < request.islands:
            raise UsageError(f"island {request.island} of {request.islands}: number them from 0")
        identity = {**request.identity, "number of islands": str(request.islands)}
        if not self.present:  # nobody is left who could disagree
            self.islands, self.identity = request.islands, identity
        if different := [name for name, value in identity.items() if self.identity.get(name) != value]:
            raise UsageError(
                f"island {request.island} differs from the others in {', '.join(different)}: all islands of a training "
                "need the same recipe and the same number of ranks"
            )
        if (before := self.present.get(request.island)) is not None and now - before.last_heard <= SILENT_AFTER:
            raise IslandTakenError(f"island {request.island} is there already: give each island its own --island")
        island = Island(request.island, request.addresses, now, request.patience)
        self.present[request.island] = island
        return island

    def leave(self, island: Island, *, is_done: bool = False) -> None:
        if self.present.get(island.number) is island:
            del self.present[island.number]
            self.is_done = self.is_done or is_done

    def start(self, island: Island, request: StartIsland, now: float) -> None:
        island.role, island.start, island.since = "starting", request, now

    def ready(self, island: Island, request: ReadyToExchange, now: float) -> None:
        if island.is_out_of_reach:
            island.is_out_of_reach = False
            self._tell_behind(island)
            return
        if island.role != "training":  # its connection was lost, or this rendezvous is a new one
            if self.last is not None and request.last < self.last:
                self._tell_behind(island)
                return
            island.role, self.last = "training", request.last
        island.ready, island.since = request, now

    def report(self, island: Island, request: ReportExchange) -> None:
        attempt = self._attempt
        if attempt is None or island not in attempt.members or request.attempt != attempt.number:
            island.answer_with(OutcomeAnswer(is_complete=False))  # of an attempt that is over
        else:
            island.report = request

    def advance(self, now: float) -> None:
        """Decide what can be decided, and answer who waits for it."""
        for island in list(self.present.values()):
            if now - island.last_heard > SILENT_AFTER:
                self.leave(island)
        self._decide_start(now)
        self._decide_outcome()
        self._decide_members(now)

    def _training(self) -> list[Island]:
        found = [island for island in self.present.values() if island.role == "training"]
        return sorted(found, key=lambda island: island.number)

    def _starting(self) -> list[Island]:
        return sorted((island for island in self.present.values() if island.start), key=lambda island: island.number)

    def _decide_start(self, now: float) -> None:
        """All begin with the newest state that one of them has, if no island trains."""
        starting = self._starting()
        if not starting or self._training():  # they take the state of one that trains, after the next exchange
            return
        waited = max(now - island.since >= island.patience for island in starting)
        if len(starting) < self.islands and not waited:
            return
        newest = max(island.start.exchange for island in starting if island.start)
        if self.is_done and self.last is not None and newest < self.last and len(starting) < self.islands:
            for island in starting:
                island.answer_with(
                    UsageError("the other islands have trained all steps: take the model from one of their runs")
                )
            return
        source = next(island for island in starting if island.start and island.start.exchange == newest)
        self._begin(starting, source, newest)

    def _begin(self, starting: list[Island], source: Island, exchange: int) -> None:
        state = source.start
        same = [island for island in starting if island.start == state]
        recipients = [island.number for island in starting if island not in same]
        present = [island.number for island in starting]
        for island in starting:
            island.role = "training"
            if island in same:
                own = recipients if island is source else []
                island.answer_with(StartAnswer(exchange, recipients=own, present=present))
            else:
                island.answer_with(StartAnswer(exchange, source.number, source.addresses, present=present))
        self.last, self.is_done, self._attempt = exchange, False, None

    def _decide_members(self, now: float) -> None:
        if self._attempt is not None:
            return
        for island in self._training():  # it came when the others had begun without it
            if island.ready is not None and self.last is not None and island.ready.exchange <= self.last:
                self._tell_behind(island)
        training = self._training()
        ready = [island for island in training if island.ready]
        if not ready:
            return
        if now - min(island.since for island in ready) >= EXCHANGE_PATIENCE:
            for island in training:
                island.role = "training" if island.ready else "entered"
            training = ready
        if len(ready) < len(training):
            return
        exchange = max(island.ready.exchange for island in ready if island.ready)
        members = [island for island in ready if island.ready and island.ready.exchange == exchange]
        self._attempts += 1
        self._attempt = Attempt(exchange, self._attempts, members)
        addresses = {island.number: island.addresses for island in members}
        for island in members:
            island.answer_with(QuorumAnswer(self._attempts, addresses))
        for island in ready:
            if island not in members:
                self._tell_behind(island)

    def _tell_behind(self, island: Island) -> None:
        island.role = "entered"
        island.answer_with(QuorumAnswer(is_behind=True))

    def _decide_outcome(self) -> None:
        if (attempt := self._attempt) is None:
            return
        members = [island for island in attempt.members if self.present.get(island.number) is island]
        if any(island.report is None for island in members):
            return
        self._attempt = None
        failed = {number for island in members if island.report for number in island.report.failed}
        # A member that is lost was still of use if all others have its part.
        if not members or failed:
            self._answer_failed(members)
            return
        self.last, self._blame = attempt.exchange, Counter()
        source, starting = members[0], self._starting()
        present = sorted(island.number for island in [*members, *starting])
        for island in starting:
            island.role = "training"
            island.answer_with(StartAnswer(attempt.exchange, source.number, source.addresses, present=present))
        recipients = [island.number for island in starting]
        for island in members:
            island.answer_with(OutcomeAnswer(True, recipients if island is source else []))

    def _answer_failed(self, members: list[Island]) -> None:
        present = {island.number for island in members}
        failed = Counter(
            number for island in members if island.report for number in island.report.failed if number in present
        )
        self._blame.update(failed.keys())
        # One at a time, the one that most could not reach. Two that blame each other: the first one stays.
        worst = max(members, key=lambda one: (self._blame[one.number], failed[one.number], one.number), default=None)
        if worst is not None and self._blame[worst.number] >= MAX_BLAME:
            worst.is_out_of_reach = True
            del self._blame[worst.number]
        for island in members:
            island.answer_with(OutcomeAnswer(is_complete=False))
