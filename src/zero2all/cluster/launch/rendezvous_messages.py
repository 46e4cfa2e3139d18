"""Messages of the rendezvous: the requests of a client, and what the server sends."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Literal

from zero2all.base.errors import UsageError
from zero2all.cluster.launch.notify import JobEvent
from zero2all.cluster.launch.pair_check import TurnReport
from zero2all.cluster.launch.restart_policy import ExcludedNode, FailureFacts, StragglerPolicy
from zero2all.cluster.launch.stragglers import ArrivalReport

SERVICE = "rendezvous"
HEARTBEAT_INTERVAL = 2.0  # seconds between two heartbeats of a node
Outcome = Literal["done", "failed"]


@dataclass(frozen=True)
class RendezvousSettings:
    """The same on every node of a job."""

    counts: tuple[int, ...]
    """Node counts that the job can run on, ascending."""
    settle: float = 10.0
    """Seconds without a new node after which no more are expected, at the start and while the job is running."""
    last_call: float = 3.0
    """The same after a loss, when the job is waiting."""
    longest_call: float = 60.0
    """The longest time that new nodes can delay a round. A round also runs that long before it is ended for new nodes,
    unless they complete the job: nodes that come one after another do not restart it one by one."""
    dead_after: float = 10.0
    """Seconds without a heartbeat after which a node is lost."""
    node_test: bool = True
    """Whether nodes are tested before they restart after a failure that one of them may have caused."""
    stragglers: StragglerPolicy = "warn"
    """What is done about a node that all others wait for."""

    def __post_init__(self) -> None:
        if not self.counts or list(self.counts) != sorted(set(self.counts)) or self.counts[0] < 1:
            raise UsageError(f"node counts must be ascending and positive, not {self.counts}")

    @property
    def max_nodes(self) -> int:
        return self.counts[-1]

    def usable_nodes(self, nodes: int) -> int:
        """The largest node count of the job that is at most ``nodes``."""
        smaller = bisect_right(self.counts, nodes)
        return self.counts[smaller - 1] if smaller else 0


@dataclass(frozen=True)
class RendezvousRequest:
    """What a client asks. The name of its class is sent as ``op``, beside the fields."""


@dataclass(frozen=True)
class OwnNode:
    address: str
    pid: int
    procs: int


@dataclass(frozen=True)
class Enter(RendezvousRequest):
    """A node registers; from now on it receives the status."""

    job: str
    rules: RendezvousSettings
    node: OwnNode
    readmit: bool = False
    """Whether the node may come back although it is excluded."""
    excluded: tuple[ExcludedNode, ...] = ()
    """The excluded nodes that this node knows, if the rendezvous was started again."""


@dataclass(frozen=True)
class Attach(RendezvousRequest):
    """A rank of the job wants to use its key-value store."""

    job: str


@dataclass(frozen=True)
class JoinNextRound(RendezvousRequest):
    """The answer is a ``RankAssignment``, once the round forms."""

    port: int
    failed: bool


@dataclass(frozen=True)
class Ping(RendezvousRequest):
    """The heartbeat of a node."""


@dataclass(frozen=True)
class Leave(RendezvousRequest):
    """The ranks of a node have saved and ended."""


@dataclass(frozen=True)
class Close(RendezvousRequest):
    outcome: Outcome


@dataclass(frozen=True)
class ReportFailure(RendezvousRequest):
    """The answer is a ``FailureAnswer``."""

    facts: FailureFacts


@dataclass(frozen=True)
class ReportTestTurn(RendezvousRequest):
    """The answer is a ``NextTurn``, once all nodes have reported theirs."""

    report: TurnReport


@dataclass(frozen=True)
class ReadClock(RendezvousRequest):
    """The answer is the time at the rendezvous, in seconds since 1970."""


@dataclass(frozen=True)
class ReportArrivals(RendezvousRequest):
    """The answer is a warning about a slow node, or None."""

    report: ArrivalReport


@dataclass(frozen=True)
class SetValues(RendezvousRequest):
    values: dict[str, str]
    """The values in base64."""


@dataclass(frozen=True)
class GetValues(RendezvousRequest):
    """Waits until all keys are set."""

    keys: list[str]
    seconds: float


@dataclass(frozen=True)
class AddToValue(RendezvousRequest):
    key: str
    amount: int


@dataclass(frozen=True)
class CheckKeys(RendezvousRequest):
    keys: list[str]


@dataclass(frozen=True)
class DeleteKey(RendezvousRequest):
    key: str


@dataclass(frozen=True)
class FailureAnswer:
    """What the rendezvous decides about a node that has reported a failure."""

    excluded: str | None = None
    """Why it must leave the job, if so."""
    kept: str | None = None
    """Why it stays although a rule says that it is bad, if so."""


@dataclass(frozen=True)
class RankAssignment:
    """The assignment of one member of a round."""

    round: int
    rank: int
    nodes: int
    first_rank: int
    """The first rank on this node; ``rank`` is the node's own."""
    ranks: int
    """The number of ranks in all."""
    master: str
    port: int
    events: tuple[JobEvent, ...] = ()
    """The events since the previous round; only for the first node, which reports them."""
    node_test: bool = False
    """Whether the nodes are tested before their ranks start."""


@dataclass(frozen=True)
class RendezvousStatus:
    """Every node gets it when it changes: a few times for each round, however many nodes return one by one."""

    running: int = 0
    """Nodes that the current round began with; 0 once all have returned."""
    change: bool = False
    """Members must save and return, for a larger round or one without a node that left."""
    lost: tuple[str, ...] = ()
    """Members that are gone or have failed: their peers must not wait for them. The first few are named."""
    closed: Outcome | None = None
    spares: int = 0
    """Nodes that wait while the job is running: it cannot use them, or not yet."""
    excluded: tuple[ExcludedNode, ...] = ()


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


class RequestError(Exception):
    """An authenticated request that fails; the client raises an error by ``kind``."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
