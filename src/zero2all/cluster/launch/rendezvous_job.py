"""One job at the rendezvous server: its connections, its key-value store, and the handlers of their requests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from zero2all.base.console import say
from zero2all.base.network.connection import SignedSession
from zero2all.cluster.launch.key_values import KeyValues
from zero2all.cluster.launch.membership import Node
from zero2all.cluster.launch.pair_check import NextTurn
from zero2all.cluster.launch.rendezvous_messages import (
    AddToValue,
    CheckKeys,
    Close,
    DeleteKey,
    FailureAnswer,
    GetValues,
    JoinNextRound,
    RankAssignment,
    RendezvousRequest,
    RendezvousStatus,
    ReportArrivals,
    ReportFailure,
    ReportTestTurn,
    RequestError,
    ServerMessage,
    SetValues,
)
from zero2all.cluster.launch.rendezvous_state import RendezvousState
from zero2all.cluster.launch.restart_policy import READMIT_ADVICE, ExcludedNode

TICK_INTERVAL = 0.1
ADVANCE_DELAY = 2e-5  # seconds for each node that a job's next decision is put off, for others that arrive meanwhile


@dataclass(eq=False)
class Peer:
    """One authenticated connection."""

    name: str
    address: str
    session: SignedSession
    writer: asyncio.StreamWriter
    job: RendezvousJob | None = None
    node: str | None = None

    def send(self, message: ServerMessage) -> None:
        self.send_encoded(_encode(message))

    def send_encoded(self, message: bytes) -> None:
        if not self.writer.is_closing():
            self.writer.write(self.session.seal_encoded(message))


Handler = Callable[[Peer, Any], object]
"""Returns the answer to a request, or a coroutine if the answer may take long."""


@dataclass(eq=False)
class RendezvousJob:
    """One of the jobs that use this rendezvous."""

    state: RendezvousState
    values: KeyValues = field(default_factory=KeyValues)
    peers: dict[str, Peer] = field(default_factory=dict)
    _pending: dict[str, asyncio.Future[RankAssignment]] = field(default_factory=dict)
    """The assignments that nodes wait for."""
    _status: RendezvousStatus = field(default_factory=RendezvousStatus)
    """The status that every node has been sent."""
    _is_due: bool = False
    """Whether the next decision is scheduled."""

    def enter(self, peer: Peer, node: Node) -> None:
        peer.job, peer.node = self, node.id
        self.state.register(node, time.monotonic())
        self.peers[node.id] = peer
        if self._status != RendezvousStatus():
            peer.send(ServerMessage(status=self._status))

    def leave(self, peer: Peer, node: str, *, gracefully: bool) -> None:
        self.state.leave(node, gracefully=gracefully)
        self.peers.pop(node, None)
        if (assignment := self._pending.pop(node, None)) is not None and not assignment.done():
            assignment.cancel()
        self._advance_soon()
        peer.node = None

    def advance(self) -> None:
        """Form a round if it is due, and send every node the new status."""
        self._is_due = False
        assignments = self.state.advance(time.monotonic())
        if assignments:
            self.values.clear()  # they are of the previous round
        for id in list(self._pending):
            entry = self.state.exclusions.of(id)
            if entry is not None and not (waiting := self._pending.pop(id)).done():
                waiting.set_exception(excluded_error(entry))
        for id, assignment in assignments.items():
            if not (waiting := self._pending.pop(id)).done():
                waiting.set_result(assignment)
        status = self.state.status()
        if status != self._status:
            self._status, encoded = status, _encode(ServerMessage(status=status))
            for peer in self.peers.values():
                peer.send_encoded(encoded)
        for id in self.peers.keys() - self.state.membership.nodes.keys():  # silent for too long
            self.peers[id].writer.close()
        if status.closed is not None:
            for waiting in self._pending.values():
                if not waiting.done():
                    waiting.set_exception(RequestError("closed", status.closed))
            self._pending.clear()

    def _advance_soon(self) -> None:
        """One decision for all that arrives until then: it looks at every node, and a thousand may arrive at once."""
        if not self._is_due:
            self._is_due = True
            delay = min(TICK_INTERVAL, len(self.peers) * ADVANCE_DELAY)
            asyncio.get_running_loop().call_later(delay, self.advance)

    async def join_next_round(self, peer: Peer, request: JoinNextRound) -> RankAssignment:
        if peer.node is None or peer.node not in self.state.membership.nodes:
            raise RequestError("lost", "this node was silent for too long, and is no longer known")
        if self.state.closed is not None:
            raise RequestError("closed", self.state.closed)
        if (entry := self.state.exclusions.of(peer.node)) is not None:
            self.state.leave(peer.node, gracefully=True)
            raise excluded_error(entry)
        self.state.join_next_round(peer.node, request.port, time.monotonic(), failed=request.failed)
        assignment = self._pending[peer.node] = asyncio.get_running_loop().create_future()
        self._advance_soon()
        try:
            found: RankAssignment = await assignment
            return found
        except asyncio.CancelledError:
            raise RequestError("lost", "the connection is gone") from None

    def close(self, peer: Peer, request: Close) -> bool:
        """Whether it was this node that closed it."""
        first = self.state.closed is None
        self.state.close(request.outcome)
        self._advance_soon()
        return first

    def report_failure(self, peer: Peer, request: ReportFailure) -> FailureAnswer:
        if peer.node is None or peer.node not in self.state.membership.nodes:
            raise RequestError("lost", "this node is no longer known")
        answer = self.state.exclusions.report_failure(peer.node, request.facts)
        if answer.excluded is not None:
            say(f"rendezvous: node {self.state.membership.nodes[peer.node]} is excluded: {answer.excluded}")
        return answer

    async def report_test_turn(self, peer: Peer, request: ReportTestTurn) -> NextTurn:
        if peer.node is None:
            raise RequestError("usage", "only nodes are tested")
        self.state.tests.report_turn(peer.node, request.report)
        while (answer := self.state.tests.next_turn(peer.node, request.report.turn)) is None:
            await asyncio.sleep(TICK_INTERVAL)
        return answer

    def report_arrivals(self, peer: Peer, request: ReportArrivals) -> str | None:
        if peer.node is None:
            raise RequestError("usage", "only nodes report arrivals")
        return self.state.exclusions.report_arrivals(peer.node, request.report)


def _for_job(handle: Callable[[RendezvousJob, Peer, Any], object]) -> Handler:
    return lambda peer, request: handle(_job_of(peer), peer, request)


def _for_values(handle: Callable[[KeyValues, Any], object]) -> Handler:
    return lambda peer, request: handle(_job_of(peer).values, request)


JOB_HANDLERS: dict[type[RendezvousRequest], Handler] = {
    JoinNextRound: _for_job(RendezvousJob.join_next_round),
    Close: _for_job(RendezvousJob.close),
    ReportFailure: _for_job(RendezvousJob.report_failure),
    ReportTestTurn: _for_job(RendezvousJob.report_test_turn),
    ReportArrivals: _for_job(RendezvousJob.report_arrivals),
    SetValues: _for_values(KeyValues.set),
    GetValues: _for_values(KeyValues.get),
    AddToValue: _for_values(KeyValues.add),
    CheckKeys: _for_values(KeyValues.check),
    DeleteKey: _for_values(KeyValues.delete),
}


def excluded_error(entry: ExcludedNode) -> RequestError:
    text = f"node {entry.name} ({entry.address}) is excluded from the job: {entry.reason}; {READMIT_ADVICE}"
    return RequestError("excluded", text)


def _job_of(peer: Peer) -> RendezvousJob:
    if peer.job is None:
        raise RequestError("usage", "attach to a job first")
    return peer.job


def _encode(message: ServerMessage) -> bytes:
    return json.dumps({name: value for name, value in asdict(message).items() if value is not None}).encode()
