"""Messages of the rendezvous: the requests of a client, and what the server sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero2all.elastic.pair_test import TurnReport
from zero2all.elastic.rendezvous_state import Outcome, RendezvousSettings, RendezvousStatus
from zero2all.elastic.restart_policy import ExcludedNode, FailureFacts
from zero2all.elastic.stragglers import ArrivalReport

SERVICE = "rendezvous"
HEARTBEAT_INTERVAL = 2.0  # seconds between two heartbeats of a node


@dataclass(frozen=True)
class Request:
    """What a client asks. The name of its class is sent as ``op``, beside the fields."""


@dataclass(frozen=True)
class OwnNode:
    address: str
    pid: int
    procs: int


@dataclass(frozen=True)
class Enter(Request):
    """A node registers; from now on it receives the status."""

    job: str
    rules: RendezvousSettings
    node: OwnNode
    readmit: bool = False
    """Whether the node may come back although it is excluded."""
    excluded: tuple[ExcludedNode, ...] = ()
    """As far as the node knows, if the rendezvous was started again."""


@dataclass(frozen=True)
class Attach(Request):
    """A rank of the job wants to use its key-value store."""

    job: str


@dataclass(frozen=True)
class JoinNextRound(Request):
    """The answer is a ``RankAssignment``, once the round forms."""

    port: int
    failed: bool


@dataclass(frozen=True)
class Ping(Request):
    """The heartbeat of a node."""


@dataclass(frozen=True)
class Leave(Request):
    """The ranks of a node have saved and ended."""


@dataclass(frozen=True)
class Close(Request):
    outcome: Outcome


@dataclass(frozen=True)
class ReportFailure(Request):
    """The answer is a ``FailureAnswer``."""

    facts: FailureFacts


@dataclass(frozen=True)
class ReportTestTurn(Request):
    """The answer is a ``NextTurn``, once all nodes have reported theirs."""

    report: TurnReport


@dataclass(frozen=True)
class ReadClock(Request):
    """The answer is the time at the rendezvous, in seconds since 1970."""


@dataclass(frozen=True)
class ReportArrivals(Request):
    """The answer is a warning about a slow node, or None."""

    report: ArrivalReport


@dataclass(frozen=True)
class SetValues(Request):
    values: dict[str, str]
    """In base64."""


@dataclass(frozen=True)
class GetValues(Request):
    """Waits until all keys are set."""

    keys: list[str]
    seconds: float


@dataclass(frozen=True)
class AddToValue(Request):
    key: str
    amount: int


@dataclass(frozen=True)
class CheckKeys(Request):
    keys: list[str]


@dataclass(frozen=True)
class DeleteKey(Request):
    key: str


@dataclass(frozen=True)
class RequestHead:
    """What the server reads of a request before it knows its type."""

    id: int | None = None
    op: str | None = None


@dataclass(frozen=True)
class ServerMessage:
    """The answer to the request ``id``, or a new status. What is None is not sent."""

    id: int | None = None
    value: Any = None
    error: str | None = None
    kind: str | None = None
    status: RendezvousStatus | None = None
