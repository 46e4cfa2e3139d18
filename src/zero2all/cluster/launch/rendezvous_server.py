"""The rendezvous server: it accepts connections, and passes their requests to jobs and to DiLoCo islands.

It does not import torch, which takes 200 MB: ``z2a launch --rendezvous-only`` runs on a machine of its own.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from zero2all.base.console import say
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.network.addresses import DEFAULT_PORT, LOOPBACK, default_address
from zero2all.base.network.connection import LENGTH_BYTES, Connection, Server, TamperedError, frame_length
from zero2all.base.processes import raise_descriptor_limit
from zero2all.base.records import parse_record
from zero2all.cluster.launch.islands.server import IslandTrainings
from zero2all.cluster.launch.job_secret import find_secret
from zero2all.cluster.launch.membership import Node
from zero2all.cluster.launch.rendezvous_job import (
    JOB_HANDLERS,
    TICK_INTERVAL,
    Handler,
    Peer,
    RendezvousJob,
    excluded_error,
)
from zero2all.cluster.launch.rendezvous_messages import (
    SERVICE,
    Attach,
    Enter,
    Leave,
    Ping,
    ReadClock,
    RendezvousRequest,
    RequestError,
    RequestHead,
    ServerMessage,
)
from zero2all.cluster.launch.rendezvous_state import RendezvousState
from zero2all.cluster.launch.restart_policy import ExcludedNode, NodeKey


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
        self.islands = IslandTrainings()
        self._jobs: dict[str, RendezvousJob] = {}
        self._excluded: dict[str, dict[NodeKey, ExcludedNode]] = {}
        """The excluded nodes of each job: a job that ends and starts again keeps them."""
        self._peers: set[Peer] = set()
        self._handlers: dict[type[RendezvousRequest], Handler] = {
            Enter: self._enter,
            Attach: self._attach,
            Leave: self._leave,
            Ping: lambda peer, request: None,
            ReadClock: lambda peer, request: time.time(),
            **JOB_HANDLERS,
            **self.islands.handlers(),
        }
        self._requests = {request.__name__: request for request in self._handlers}

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
                job.advance()
            self.islands.advance()

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
            self.islands.record_heartbeat(peer)
            self._handle_request(peer, message)

    def _handle_request(self, peer: Peer, message: object) -> None:
        """Answers at once, or starts a task if the answer may take long."""
        head = RequestHead()
        with _errors_answered(peer, lambda: head.id):
            head = parse_record(RequestHead, message, "request")
            if head.op not in self._requests:
                raise RequestError("usage", f"unknown request {head.op!r}: is this node of another version?")
            request = parse_record(self._requests[head.op], message, head.op)
            answer = self._handlers[type(request)](peer, request)
            if isinstance(answer, Coroutine):
                self.keep(asyncio.create_task(self._answer_later(peer, head.id, answer)))
            else:
                peer.send(ServerMessage(head.id, answer))

    async def _answer_later(self, peer: Peer, id: int | None, answer: Coroutine[Any, Any, object]) -> None:
        with _errors_answered(peer, lambda: id):
            peer.send(ServerMessage(id, await answer))

    def _disconnect(self, peer: Peer, *, gracefully: bool) -> None:
        if peer.job is not None and peer.node is not None:
            peer.job.leave(peer, peer.node, gracefully=gracefully)
            if not peer.job.peers:  # no node is left: a later one starts the job again
                self._jobs = {name: job for name, job in self._jobs.items() if job is not peer.job}
        self.islands.disconnect(peer)

    def _enter(self, peer: Peer, request: Enter) -> str:
        settings, own = request.rules, request.node
        node = Node(secrets.token_hex(8), peer.name, own.address, own.pid, own.procs)
        job = self._jobs.get(request.job)
        if job is None or job.state.closed is not None:  # the job has ended and starts again
            excluded = self._excluded.setdefault(request.job, {})
            job = self._jobs[request.job] = RendezvousJob(RendezvousState(settings, excluded=excluded))
        elif (known := job.state.membership.settings) != settings:
            raise RequestError(
                "usage",
                f"the job runs on {_format_node_counts(known.counts)} nodes, and node {peer.name} asks for "
                f"{_format_node_counts(settings.counts)}: give the same --nnodes on every node",
            )
        if request.readmit and (entry := job.state.exclusions.readmit(node.key)) is not None:
            say(f"rendezvous: node {node} is readmitted; it was excluded: {entry.reason}")
        job.state.exclusions.learn(request.excluded)
        if (entry := job.state.exclusions.entries.get(node.key)) is not None:
            raise excluded_error(entry)
        job.enter(peer, node)
        return node.id

    def _attach(self, peer: Peer, request: Attach) -> None:
        job = self._jobs.get(request.job)
        if job is None:
            raise RequestError("usage", "unknown job")
        peer.job = job

    def _leave(self, peer: Peer, request: Leave) -> None:
        self._disconnect(peer, gracefully=True)


@contextmanager
def _errors_answered(peer: Peer, id: Callable[[], int | None]) -> Iterator[None]:
    """A request that fails is answered with its error."""
    try:
        yield
    except RequestError as error:
        peer.send(ServerMessage(id(), error=str(error), kind=error.kind))
    except UsageError as error:
        peer.send(ServerMessage(id(), error=str(error), kind="usage"))
    except (ArithmeticError, LookupError, ValueError, Z2aError) as error:
        peer.send(ServerMessage(id(), error=f"malformed request ({error})", kind="usage"))


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
