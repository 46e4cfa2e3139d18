"""The process that holds the rendezvous: it knows who is there, decides on rounds, and keeps a few values for them."""

from __future__ import annotations

import asyncio
import base64
import hmac
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from zero2all.console import say
from zero2all.errors import Z2aError
from zero2all.resilience.rounds import Node, Rounds, Status, read_rules
from zero2all.resilience.wire import (
    LENGTH,
    MAC,
    MAGIC,
    NONCE,
    REFUSED,
    WELCOME,
    Channel,
    Message,
    TamperedError,
    client_proof,
    frame_length,
    server_proof,
    shown,
)

HANDSHAKE = 10.0  # seconds in which a stranger must prove what he knows
STRANGERS = 1024  # at a time
TICK = 0.1
BACKLOG = 4096
SAY_AGAIN = 60.0  # seconds before the same address is complained about again


class RequestError(Exception):
    """A request of somebody with the secret that cannot be met; ``kind`` tells the other side what to make of it."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass
class Job:
    """One job of several that may meet here."""

    rounds: Rounds
    values: dict[str, bytes] = field(default_factory=dict)
    watchers: dict[str, list[asyncio.Event]] = field(default_factory=dict)
    seats: dict[str, asyncio.Future[Message]] = field(default_factory=dict)
    """Of nodes that wait for a round."""
    peers: dict[str, Peer] = field(default_factory=dict)

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value
        for event in self.watchers.pop(key, []):
            event.set()

    async def until(self, keys: list[str], timeout: float) -> None:
        """All of them are there."""
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
    """One connection that has proved that it knows the secret."""

    name: str
    address: str
    channel: Channel
    writer: asyncio.StreamWriter
    job: Job | None = None
    node: str | None = None
    status: Status = field(default_factory=Status)

    def send(self, message: Message) -> None:
        if not self.writer.is_closing():
            self.writer.write(self.channel.seal(message))


class Host:
    """
    >>> host = Host("10.0.0.1", 29500, secret)
    >>> host.start()  # in a thread of its own
    >>> host.place
    '10.0.0.1:29500'
    """

    def __init__(self, address: str, port: int, secret: str) -> None:
        """Binds that address alone."""
        self._secret = secret.encode()
        self._socket = _listen(address, port)
        self.port: int = self._socket.getsockname()[1]
        self.place = f"[{address}]:{self.port}" if ":" in address else f"{address}:{self.port}"
        self._jobs: dict[str, Job] = {}
        self._peers: set[Peer] = set()
        self._strangers = 0
        self._complained: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self.serve, name="z2a-rendezvous", daemon=True)
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """What was sent last still arrives."""
        if self._loop is not None and self._over is not None and not self._loop.is_closed():
            with suppress(RuntimeError):  # it has just ended by itself
                self._loop.call_soon_threadsafe(self._over.set)
        if self._thread is not None:
            self._thread.join(5)

    def serve(self) -> None:
        """Until ``stop`` is called."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._meet, sock=self._socket, backlog=BACKLOG)
        self._ready.set()
        ticker = asyncio.create_task(self._tick())
        try:
            await self._over.wait()
        finally:
            ticker.cancel()
            server.close()
            for peer in list(self._peers):
                with suppress(OSError, asyncio.TimeoutError):
                    await asyncio.wait_for(peer.writer.drain(), 1)
                peer.writer.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            for job in list(self._jobs.values()):
                self._advance(job)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = str((writer.get_extra_info("peername") or ("?",))[0])
        peer: Peer | None = None
        try:
            if self._strangers >= STRANGERS:
                raise OSError("too many that have proved nothing")
            self._strangers += 1
            try:
                peer = await asyncio.wait_for(self._handshake(reader, writer, address), HANDSHAKE)
            finally:
                self._strangers -= 1
            if peer is not None:
                self._peers.add(peer)
                await self._converse(reader, peer)
        except TamperedError as error:
            self._complain(address, f"{peer.name if peer else 'somebody'} ({address}) sent {error}: disconnected")
        except (OSError, EOFError, TimeoutError):
            pass  # gone, or never said a word
        finally:
            if peer is not None:
                self._peers.discard(peer)
                self._gone(peer, politely=False)
            with suppress(OSError):
                writer.close()

    async def _handshake(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> Peer | None:
        nonce = secrets.token_bytes(NONCE)
        writer.write(MAGIC + nonce)
        theirs = await reader.readexactly(NONCE)
        name = await reader.readexactly((await reader.readexactly(1))[0])
        proof = await reader.readexactly(MAC)
        if not hmac.compare_digest(proof, client_proof(self._secret, nonce, theirs, name)):
            self._complain(address, f"node {shown(name)} ({address}) was refused: wrong job secret")
            writer.write(REFUSED)
            await writer.drain()
            return None
        writer.write(WELCOME + server_proof(self._secret, nonce, theirs))
        return Peer(shown(name), address, Channel(self._secret, nonce, theirs, is_server=True), writer)

    def _complain(self, address: str, text: str) -> None:
        now = time.monotonic()
        if now - self._complained.get(address, -SAY_AGAIN) >= SAY_AGAIN:
            if len(self._complained) >= STRANGERS:
                self._complained.clear()
            self._complained[address] = now
            say(f"rendezvous: {text}")

    async def _converse(self, reader: asyncio.StreamReader, peer: Peer) -> None:
        while True:
            length = frame_length(await reader.readexactly(LENGTH))
            message = peer.channel.open(await reader.readexactly(length))
            if peer.job is not None and peer.node is not None:
                peer.job.rounds.hear(peer.node, time.monotonic())
            task = asyncio.create_task(self._answer(peer, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, peer: Peer, message: Message) -> None:
        number = message.get("id")
        try:
            operation = _OPERATIONS.get(str(message.get("op")))
            if operation is None:
                raise RequestError("usage", f"unknown request {message.get('op')!r}: is this node of another version?")
            peer.send({"id": number, "value": await operation(self, peer, message)})
        except RequestError as error:
            peer.send({"id": number, "error": str(error), "kind": error.kind})
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, Z2aError) as error:
            peer.send({"id": number, "error": f"malformed request ({error})", "kind": "usage"})

    def _gone(self, peer: Peer, politely: bool) -> None:
        if peer.job is not None and peer.node is not None:
            peer.job.rounds.leave(peer.node, politely)
            peer.job.peers.pop(peer.node, None)
            if (seat := peer.job.seats.pop(peer.node, None)) is not None and not seat.done():
                seat.cancel()
            self._advance(peer.job)
            if not peer.job.peers:  # nobody is left: who comes later starts the job again
                self._jobs = {name: job for name, job in self._jobs.items() if job is not peer.job}
            peer.node = None

    def _advance(self, job: Job) -> None:
        """Form a round if it is time, and tell everybody what has changed."""
        seats = job.rounds.step(time.monotonic())
        if seats:
            job.values.clear()  # of the round before
        for id, seat in seats.items():
            if not (waiting := job.seats.pop(id)).done():
                waiting.set_result(asdict(seat))
        status = job.rounds.status()
        for id, peer in list(job.peers.items()):
            if peer.status != status:
                peer.status = status
                peer.send({"status": asdict(status)})
            if id not in job.rounds.nodes:  # silent for too long
                peer.writer.close()
        if status.closed is not None:
            for waiting in job.seats.values():
                if not waiting.done():
                    waiting.set_exception(RequestError("closed", status.closed))
            job.seats.clear()

    async def _enter(self, peer: Peer, message: Message) -> str:
        """A node registers; from now on it is told the status."""
        name, rules, own = str(message["job"]), read_rules(message["rules"]), message["node"]
        node = Node(secrets.token_hex(8), peer.name, str(own["address"]), int(own["pid"]), int(own["procs"]))
        job = self._jobs.get(name)
        if job is None or job.rounds.closed is not None:  # the job has ended and is started again
            job = self._jobs[name] = Job(Rounds(rules))
        elif job.rounds.rules != rules:
            raise RequestError(
                "usage",
                f"the job runs on {_counts(job.rounds.rules.counts)} nodes, and node {peer.name} asks for "
                f"{_counts(rules.counts)}: give the same --nodes on every node",
            )
        peer.job, peer.node = job, node.id
        job.rounds.enter(node, time.monotonic())
        job.peers[peer.node] = peer
        return peer.node

    async def _attach(self, peer: Peer, message: Message) -> None:
        """A rank of the job that wants to use its values."""
        job = self._jobs.get(str(message["job"]))
        if job is None:
            raise RequestError("usage", "no such job is here")
        peer.job = job

    async def _wait(self, peer: Peer, message: Message) -> Message:
        job = _job(peer)
        if peer.node is None or peer.node not in job.rounds.nodes:
            raise RequestError("lost", "this node was silent for too long, and is no longer known")
        if job.rounds.closed is not None:
            raise RequestError("closed", job.rounds.closed)
        job.rounds.wait(peer.node, int(message["port"]), time.monotonic(), bool(message["failed"]))
        seat = job.seats[peer.node] = asyncio.get_running_loop().create_future()
        self._advance(job)
        try:
            found: Message = await seat
            return found
        except asyncio.CancelledError:
            raise RequestError("lost", "the connection is gone") from None

    async def _beat(self, peer: Peer, message: Message) -> None:
        return None

    async def _leave(self, peer: Peer, message: Message) -> None:
        self._gone(peer, politely=True)

    async def _close(self, peer: Peer, message: Message) -> None:
        job = _job(peer)
        job.rounds.close("done" if message["outcome"] == "done" else "failed")
        self._advance(job)

    async def _fail(self, peer: Peer, message: Message) -> Message:
        if peer.node is None:
            raise RequestError("usage", "only nodes fail")
        left, elsewhere = _job(peer).rounds.fail(peer.node, int(message["step"]))
        return {"left": left, "elsewhere": elsewhere}

    async def _set(self, peer: Peer, message: Message) -> None:
        for key, value in message["values"].items():
            _job(peer).put(key, base64.b64decode(value))

    async def _get(self, peer: Peer, message: Message) -> list[str]:
        job, keys = _job(peer), list(message["keys"])
        await job.until(keys, float(message["seconds"]))
        return [base64.b64encode(job.values[key]).decode() for key in keys]

    async def _add(self, peer: Peer, message: Message) -> int:
        job, key = _job(peer), message["key"]
        total = int(job.values.get(key, b"0")) + int(message["amount"])
        job.put(key, str(total).encode())
        return total

    async def _until(self, peer: Peer, message: Message) -> None:
        await _job(peer).until(list(message["keys"]), float(message["seconds"]))

    async def _check(self, peer: Peer, message: Message) -> bool:
        return all(key in _job(peer).values for key in message["keys"])

    async def _delete(self, peer: Peer, message: Message) -> bool:
        return _job(peer).values.pop(message["key"], None) is not None


_OPERATIONS: dict[str, Callable[[Host, Peer, Message], Any]] = {
    "enter": Host._enter, "attach": Host._attach, "wait": Host._wait, "beat": Host._beat, "leave": Host._leave,
    "close": Host._close, "fail": Host._fail, "set": Host._set, "get": Host._get, "add": Host._add,
    "until": Host._until, "check": Host._check, "delete": Host._delete,
}  # fmt: skip


def _job(peer: Peer) -> Job:
    if peer.job is None:
        raise RequestError("usage", "say first which job this is")
    return peer.job


def _counts(counts: tuple[int, ...]) -> str:
    if len(counts) > 1 and list(counts) == list(range(counts[0], counts[-1] + 1)):
        return f"{counts[0]}:{counts[-1]}"
    return " or ".join(map(str, counts[:8])) + (" ..." if len(counts) > 8 else "")


def _listen(address: str, port: int) -> socket.socket:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # one descriptor for each node
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening
