"""What rank 0 of an island asks the rendezvous of all islands, and the answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from zero2all.cluster.launch.rendezvous_messages import RendezvousRequest

Addresses = list[tuple[str, int]]
"""Host and port of each rank of an island, where it serves its counterparts."""


@dataclass(frozen=True)
class EnterIslands(RendezvousRequest):
    """The first request of a connection, which belongs to this island from now on."""

    training: str
    """The same for all islands of a training."""
    island: int
    islands: int
    identity: dict[str, str]
    """What must be the same on all islands, each under a name for people."""
    addresses: Addresses
    patience: float
    """Seconds that a start waits for all islands."""


@dataclass(frozen=True)
class StartIsland(RendezvousRequest):
    """An island has loaded its state, or has missed an exchange. The answer is a ``StartAnswer``, once it may train."""

    exchange: int
    """The last one that its state has; -1 if none."""
    digest: str
    """The digest of what must be the same on all islands."""


@dataclass(frozen=True)
class ReadyToExchange(RendezvousRequest):
    """An island offers its part of an exchange. The answer is a ``QuorumAnswer``, once all islands present have."""

    exchange: int
    last: int
    """The one before, as this island knows it."""


@dataclass(frozen=True)
class ReportExchange(RendezvousRequest):
    """An island has received the parts of all others, or not. The answer is an ``OutcomeAnswer``, once all have."""

    exchange: int
    attempt: int
    failed: list[int]
    """Islands whose part could not be received."""


@dataclass(frozen=True)
class LeaveIslands(RendezvousRequest):
    """This island has trained all steps."""


@dataclass(frozen=True)
class StartAnswer:
    exchange: int
    """The last one of the state to begin with."""
    source: int | None = None
    """The island that has this state, if it is not the one that was loaded."""
    addresses: Addresses = field(default_factory=list)
    """The addresses of its ranks."""
    recipients: list[int] = field(default_factory=list)
    """The islands that take the state of this one."""
    present: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class QuorumAnswer:
    attempt: int = 0
    members: dict[int, Addresses] = field(default_factory=dict)
    is_behind: bool = False
    """The others have completed this exchange, or a later one, without this island."""


@dataclass(frozen=True)
class OutcomeAnswer:
    is_complete: bool
    """Every member has all parts. Otherwise the exchange is attempted again."""
    recipients: list[int] = field(default_factory=list)
    """Islands that take the state of this one after this exchange."""


WaitingRequest = StartIsland | ReadyToExchange | ReportExchange
IslandAnswer = StartAnswer | QuorumAnswer | OutcomeAnswer
