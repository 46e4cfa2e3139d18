"""The rendezvous server: it tracks the nodes of each job, forms rounds, and keeps a small key-value store.

It does not import torch, which takes 200 MB: ``z2a launch --rendezvous-only`` runs on a machine of its own.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zero2all.connection import LENGTH_BYTES, Connection, Server, SignedSession, TamperedError, frame_length
from zero2all.console import say
from zero2all.elastic.island_quorum import (
    Answer,
    EnterIslands,
    IslandSeat,
    IslandTakenError,
    IslandTraining,
    LeaveIslands,
    ReadyToExchange,
    ReportExchange,
    StartIsland,
    WaitingRequest,
    take_seat,
)
from zero2all.elastic.job_secret import find_secret
from zero2all.elastic.pair_test import NextTurn
from zero2all.elastic.rendezvous_messages import (
    SERVICE,
    AddToValue,
    Attach,
    CheckKeys,
    Close,
    DeleteKey,
    Enter,
    GetValues,
    JoinNextRound,
    Leave,
    Ping,
    ReadClock,
    ReportArrivals,
    ReportFailure,
    ReportTestTurn,
    Request,
    RequestHead,
    ServerMessage,
    SetValues,
)
from zero2all.elastic.rendezvous_state import (
    FailureAnswer,
    Node,
    RankAssignment,
    RendezvousState,
    RendezvousStatus,
)
from zero2all.elastic.restart_policy import READMIT_ADVICE, ExcludedNode, NodeKey
from zero2all.errors import UsageError, Z2aError
from zero2all.network import DEFAULT_PORT, LOOPBACK, default_address
from zero2all.processes import raise_descriptor_limit
from zero2all.records import parse_record

TICK_INTERVAL = 0.1
ADVANCE_DELAY = 2e-5  # seconds for each node that a job's next decision is put off, for others that arrive meanwhile


class RequestError(Exception):
    """An authenticated request that fails; the client raises an error by ``kind``."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass
class RendezvousJob:
    """One of the jobs that use this rendezvous."""

    state: RendezvousState
    values: dict[str, bytes] = field(default_factory=dict)
    watchers: dict[str, list[asyncio.Event]] = field(default_factory=dict)
    pending_assignments: dict[str, asyncio.Future[RankAssignment]] = field(default_factory=dict)
    """Of nodes that wait for a round."""
    peers: dict[str, Peer] = field(default_factory=dict)
    status: RendezvousStatus = field(default_factory=RendezvousStatus)
    """That every node has been sent."""
    is_due: bool = False
    """Whether the next decision is scheduled."""

    def set_value(self, key: str, value: bytes) -> None:
        self.values[key] = value
        for event in self.watchers.pop(key, []):
            event.set()

    async def wait_for_keys(self, keys: list[str], timeout: float) -> None:
        """Returns when all of them are set."""
        deadline = time.monotonic() + timeout
        while missing := next((key for key in keys if key not in self.values), None):
            event = asyncio.Event()
            self.watchers.setdefault(missing, []).append(event)
            try:
                await asyncio.wait_for(event.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise RequestError("timeout", f"{missing} is not there after {timeout:.0f} s") from None


@dataclass(eq=False)
class Peer:
    """One authenticated connection."""

    name: str
    address: str
    session: SignedSession
    writer: asyncio.StreamWriter
    job: RendezvousJob | None = None
    node: str | None = None
    seat: IslandSeat | None = None
    """If it is the connection of an island."""

    def send(self, message: ServerMessage) -> None:
        self.send_encoded(_encode(message))

    def send_encoded(self, message: bytes) -> None:
        if not self.writer.is_closing():
            self.writer.write(self.session.seal_encoded(message))


class RendezvousServer(Server):
    """
    >>> server = RendezvousServer("10.0.0.1", 29500, secret)
    >>> server.start()  # in a separate thread
    >>> server.endpoint
    '10.0.0.1:29500'
    """

    def __init__(self, address: str, port: int, secret: str) -> None:
        raise_descriptor_limit()  # one connection for each node
        super().__init__(address, port, SERVICE, secret.encode())
        self.endpoint = str(self.address)
        self._jobs: dict[str, RendezvousJob] = {}
        self._excluded: dict[str, dict[NodeKey, ExcludedNode]] = {}
        """By job: a job that ends and starts again keeps them."""
        self._trainings: dict[str, IslandTraining] = {}
        self._peers: set[Peer] = set()

    def report(self, text: str) -> None:
        say(f"rendezvous: {text}")

    def has_nodes(self) -> bool:
        return any(job.peers for job in list(self._jobs.values()))

    async def run(self) -> None:
        ticker = asyncio.create_task(self._tick())
        try:
            await super().run()
        finally:
            ticker.cancel()
            for peer in list(self._peers):  # flushes what was sent
                with suppress(OSError, asyncio.TimeoutError):
                    await asyncio.wait_for(peer.writer.drain(), 1)
                peer.writer.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_INTERVAL)
            for job in list(self._jobs.values()):
                self._advance(job)
            for training in self._trainings.values():
                training.advance()

    async def attend(self, client: Connection) -> None:
        reader, writer = await asyncio.open_connection(sock=client.socket)
        peer = Peer(client.name, client.host, client.session, writer)
        self._peers.add(peer)
        try:
            await self._read_requests(reader, peer)
        except TamperedError as error:
            self.warn_once(client.host, f"{client.name} ({client.host}) sent {error}: disconnected")
        except (OSError, EOFError):
            pass  # disconnected
        finally:
            self._peers.discard(peer)
            self._disconnect(peer, gracefully=False)
            with suppress(OSError):
                writer.close()

    async def _read_requests(self, reader: asyncio.StreamReader, peer: Peer) -> None:
        while True:
            length = frame_length(await reader.readexactly(LENGTH_BYTES))
            message = peer.session.open(await reader.readexactly(length))
            if peer.job is not None and peer.node is not None:
                peer.job.state.record_heartbeat(peer.node, time.monotonic())
            if peer.seat is not None:
                peer.seat.heard()
            self._handle_request(peer, message)

    def _handle_request(self, peer: Peer, message: object) -> None:
        """Answers at once, or starts a task if the answer may take long."""
        head = RequestHead()
        with _errors_answered(peer, lambda: head.id):
            head = parse_record(RequestHead, message, "request")
            if head.op not in _REQUESTS:
                raise RequestError("usage", f"unknown request {head.op!r}: is this node of another version?")
            request = parse_record(_REQUESTS[head.op], message, head.op)
            answer = _HANDLERS[type(request)](self, peer, request)
            if isinstance(answer, Coroutine):
                self.keep(asyncio.create_task(self._answer_later(peer, head.id, answer)))
            else:
                peer.send(ServerMessage(head.id, answer))

    async def _answer_later(self, peer: Peer, id: int | None, answer: Coroutine[Any, Any, object]) -> None:
        with _errors_answered(peer, lambda: id):
            peer.send(ServerMessage(id, await answer))

    def _disconnect(self, peer: Peer, gracefully: bool) -> None:
        if peer.job is not None and peer.node is not None:
            peer.job.state.leave(peer.node, gracefully)
            peer.job.peers.pop(peer.node, None)
            if (assignment := peer.job.pending_assignments.pop(peer.node, None)) is not None and not assignment.done():
                assignment.cancel()
            self._advance_soon(peer.job)
            if not peer.job.peers:  # no node is left: a later one starts the job again
                self._jobs = {name: job for name, job in self._jobs.items() if job is not peer.job}
            peer.node = None
        if peer.seat is not None:
            peer.seat.training.leave(peer.seat)

    def _advance_soon(self, job: RendezvousJob) -> None:
        """One decision for all that arrives until then: it looks at every node, and a thousand may arrive at once."""
        if not job.is_due:
            job.is_due = True
            delay = min(TICK_INTERVAL, len(job.peers) * ADVANCE_DELAY)
            asyncio.get_running_loop().call_later(delay, self._advance, job)

    def _advance(self, job: RendezvousJob) -> None:
        """Form a round if it is due, and send every node the new status."""
        job.is_due = False
        assignments = job.state.advance(time.monotonic())
        if assignments:
            job.values.clear()  # of the previous round
        for id in list(job.pending_assignments):
            entry = job.state.exclusion(id)
            if entry is not None and not (waiting := job.pending_assignments.pop(id)).done():
                waiting.set_exception(RequestError("excluded", _describe_exclusion(entry)))
        for id, assignment in assignments.items():
            if not (waiting := job.pending_assignments.pop(id)).done():
                waiting.set_result(assignment)
        status = job.state.status()
        if status != job.status:
            job.status, encoded = status, _encode(ServerMessage(status=status))
            for peer in job.peers.values():
                peer.send_encoded(encoded)
        for id in job.peers.keys() - job.state.nodes.keys():  # silent for too long
            job.peers[id].writer.close()
        if status.closed is not None:
            for waiting in job.pending_assignments.values():
                if not waiting.done():
                    waiting.set_exception(RequestError("closed", status.closed))
            job.pending_assignments.clear()

    def _enter(self, peer: Peer, request: Enter) -> str:
        settings, own = request.rules, request.node
        node = Node(secrets.token_hex(8), peer.name, own.address, own.pid, own.procs)
        job = self._jobs.get(request.job)
        if job is None or job.state.closed is not None:  # the job has ended and starts again
            excluded = self._excluded.setdefault(request.job, {})
            job = self._jobs[request.job] = RendezvousJob(RendezvousState(settings, excluded=excluded))
        elif job.state.settings != settings:
            raise RequestError(
                "usage",
                f"the job runs on {_format_node_counts(job.state.settings.counts)} nodes, and node {peer.name} "
                f"asks for {_format_node_counts(settings.counts)}: give the same --nnodes on every node",
            )
        if request.readmit and (entry := job.state.readmit(node.key)) is not None:
            say(f"rendezvous: node {node} is readmitted; it was excluded: {entry.reason}")
        job.state.learn_exclusions(request.excluded)
        if (entry := job.state.excluded.get(node.key)) is not None:
            raise RequestError("excluded", _describe_exclusion(entry))
        peer.job, peer.node = job, node.id
        job.state.register(node, time.monotonic())
        job.peers[peer.node] = peer
        if job.status != RendezvousStatus():
            peer.send_encoded(_encode(ServerMessage(status=job.status)))
        return peer.node

    def _attach(self, peer: Peer, request: Attach) -> None:
        job = self._jobs.get(request.job)
        if job is None:
            raise RequestError("usage", "unknown job")
        peer.job = job

    async def _join_next_round(self, peer: Peer, request: JoinNextRound) -> RankAssignment:
        job = _job_of(peer)
        if peer.node is None or peer.node not in job.state.nodes:
            raise RequestError("lost", "this node was silent for too long, and is no longer known")
        if job.state.closed is not None:
            raise RequestError("closed", job.state.closed)
        if (entry := job.state.exclusion(peer.node)) is not None:
            job.state.leave(peer.node, gracefully=True)
            raise RequestError("excluded", _describe_exclusion(entry))
        job.state.join_next_round(peer.node, request.port, time.monotonic(), request.failed)
        assignment = job.pending_assignments[peer.node] = asyncio.get_running_loop().create_future()
        self._advance_soon(job)
        try:
            found: RankAssignment = await assignment
            return found
        except asyncio.CancelledError:
            raise RequestError("lost", "the connection is gone") from None

    def _heartbeat(self, peer: Peer, request: Ping) -> None:
        return None

    def _leave(self, peer: Peer, request: Leave) -> None:
        self._disconnect(peer, gracefully=True)

    def _close(self, peer: Peer, request: Close) -> bool:
        """Whether it was this node that closed it."""
        job = _job_of(peer)
        first = job.state.closed is None
        job.state.close(request.outcome)
        self._advance_soon(job)
        return first

    def _report_failure(self, peer: Peer, request: ReportFailure) -> FailureAnswer:
        job = _job_of(peer)
        if peer.node is None or peer.node not in job.state.nodes:
            raise RequestError("lost", "this node is no longer known")
        answer = job.state.report_failure(peer.node, request.facts)
        if answer.excluded is not None:
            say(f"rendezvous: node {job.state.nodes[peer.node]} is excluded: {answer.excluded}")
        return answer

    async def _report_test_turn(self, peer: Peer, request: ReportTestTurn) -> NextTurn:
        job, turn = _job_of(peer), request.report.turn
        if peer.node is None:
            raise RequestError("usage", "only nodes are tested")
        job.state.report_test_turn(peer.node, request.report)
        while (answer := job.state.next_test_turn(peer.node, turn)) is None:
            await asyncio.sleep(TICK_INTERVAL)
        return answer

    def _read_clock(self, peer: Peer, request: ReadClock) -> float:
        return time.time()

    def _report_arrivals(self, peer: Peer, request: ReportArrivals) -> str | None:
        if peer.node is None:
            raise RequestError("usage", "only nodes report arrivals")
        return _job_of(peer).state.report_arrivals(peer.node, request.report)

    def _set(self, peer: Peer, request: SetValues) -> None:
        for key, value in request.values.items():
            _job_of(peer).set_value(key, base64.b64decode(value))

    async def _get(self, peer: Peer, request: GetValues) -> list[str]:
        job = _job_of(peer)
        await job.wait_for_keys(request.keys, request.seconds)
        return [base64.b64encode(job.values[key]).decode() for key in request.keys]

    def _add(self, peer: Peer, request: AddToValue) -> int:
        job = _job_of(peer)
        total = int(job.values.get(request.key, b"0")) + request.amount
        job.set_value(request.key, str(total).encode())
        return total

    def _check(self, peer: Peer, request: CheckKeys) -> bool:
        return all(key in _job_of(peer).values for key in request.keys)

    def _delete(self, peer: Peer, request: DeleteKey) -> bool:
        return _job_of(peer).values.pop(request.key, None) is not None

    def _enter_islands(self, peer: Peer, request: EnterIslands) -> None:
        try:
            peer.seat = take_seat(self._trainings, request)
        except IslandTakenError as error:
            raise RequestError("taken", str(error)) from None

    async def _answer_island(self, peer: Peer, request: WaitingRequest) -> Answer:
        if peer.seat is None:
            raise RequestError("usage", "enter the islands of a training first")
        try:
            return await peer.seat.answer(request)
        except ConnectionError as error:
            raise RequestError("lost", str(error)) from None

    def _leave_islands(self, peer: Peer, request: LeaveIslands) -> None:
        if peer.seat is not None:
            peer.seat.training.leave(peer.seat, is_done=True)


_HANDLERS: dict[type[Request], Callable[[RendezvousServer, Peer, Any], object]] = {
    Enter: RendezvousServer._enter,
    Attach: RendezvousServer._attach,
    Ping: RendezvousServer._heartbeat,
    Leave: RendezvousServer._leave,
    Close: RendezvousServer._close,
    ReportFailure: RendezvousServer._report_failure,
    ReadClock: RendezvousServer._read_clock,
    ReportArrivals: RendezvousServer._report_arrivals,
    SetValues: RendezvousServer._set,
    AddToValue: RendezvousServer._add,
    CheckKeys: RendezvousServer._check,
    DeleteKey: RendezvousServer._delete,
    EnterIslands: RendezvousServer._enter_islands,
    LeaveIslands: RendezvousServer._leave_islands,
    JoinNextRound: RendezvousServer._join_next_round,
    GetValues: RendezvousServer._get,
    ReportTestTurn: RendezvousServer._report_test_turn,
    StartIsland: RendezvousServer._answer_island,
    ReadyToExchange: RendezvousServer._answer_island,
    ReportExchange: RendezvousServer._answer_island,
}
_REQUESTS = {request.__name__: request for request in _HANDLERS}


def _encode(message: ServerMessage) -> bytes:
    return json.dumps({name: value for name, value in asdict(message).items() if value is not None}).encode()


@contextmanager
def _errors_answered(peer: Peer, id: Callable[[], int | None]) -> Iterator[None]:
    """What a request fails with is its answer."""
    try:
        yield
    except RequestError as error:
        peer.send(ServerMessage(id(), error=str(error), kind=error.kind))
    except UsageError as error:
        peer.send(ServerMessage(id(), error=str(error), kind="usage"))
    except (ArithmeticError, LookupError, ValueError, Z2aError) as error:
        peer.send(ServerMessage(id(), error=f"malformed request ({error})", kind="usage"))


def _describe_exclusion(entry: ExcludedNode) -> str:
    return f"node {entry.name} ({entry.address}) is excluded from the job: {entry.reason}; {READMIT_ADVICE}"


def _job_of(peer: Peer) -> RendezvousJob:
    if peer.job is None:
        raise RequestError("usage", "attach to a job first")
    return peer.job


def _format_node_counts(counts: tuple[int, ...]) -> str:
    if len(counts) > 1 and list(counts) == list(range(counts[0], counts[-1] + 1)):
        return f"{counts[0]}:{counts[-1]}"
    return " or ".join(map(str, counts[:8])) + (" ..." if len(counts) > 8 else "")


def serve_rendezvous(port: int = DEFAULT_PORT, listen: str | None = None, secret_file: Path | None = None) -> None:
    """Serve the rendezvous until this process is ended. Without ``listen``, for this machine alone."""
    secret, path = find_secret(secret_file, make=True)
    address = LOOPBACK if listen is None else listen
    try:
        server = RendezvousServer(address, port, secret)
    except OSError as error:
        raise Z2aError(
            f"{address}:{port} cannot be bound ({error.strerror}): is a rendezvous running? Try another --rdzv-listen"
        ) from None
    say(f"nodes meet at {server.endpoint}; Ctrl-C ends it")
    if listen is None:
        say(
            "only this machine reaches it: for other nodes, start it with "
            f"--rdzv-listen {default_address()}:{server.address.port}"
        )
    where = "the variable Z2A_JOB_SECRET" if path is None else f"{path} (mode 0600)"
    say(f"the job secret is in {where}: every node needs it, in the same place, by --secret-file or Z2A_JOB_SECRET")
    server.serve()
