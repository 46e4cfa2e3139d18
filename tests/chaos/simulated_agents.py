"""Many simulated agents in one process: each has its own authenticated connection to a real rendezvous and speaks its
protocol, but starts no ranks. An agent that is told of a lost peer, or to return, joins the next round at once."""

from __future__ import annotations

import asyncio
import errno
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from zero2all.base.errors import Z2aError
from zero2all.base.network.connection import (
    GREETING_BYTES,
    LENGTH_BYTES,
    WELCOME_BYTES,
    ClientHandshake,
    SignedSession,
    TamperedError,
    frame_length,
)
from zero2all.base.processes import raise_descriptor_limit, watch_parent
from zero2all.base.records import parse_record
from zero2all.cluster.launch.rendezvous_client import RETRY_INTERVAL
from zero2all.cluster.launch.rendezvous_messages import (
    HEARTBEAT_INTERVAL,
    SERVICE,
    Enter,
    JoinNextRound,
    OwnNode,
    Ping,
    RankAssignment,
    RendezvousRequest,
    RendezvousSettings,
    ServerMessage,
)

JOB = "scale-model"
RANKS_PER_NODE = 8


@dataclass(frozen=True)
class Start:
    """Connect agents with these numbers, at random times within ``over`` seconds."""

    numbers: tuple[int, ...]
    over: float = 0.0


@dataclass(frozen=True)
class Lose:
    """The socket of this agent is closed, as if its machine was lost and the network said so."""

    number: int


@dataclass(frozen=True)
class Silence:
    """This agent sends no more heartbeats, as if its machine was cut off."""

    number: int


@dataclass(frozen=True)
class Count:
    """Reply with the ``Traffic`` so far."""


Command = Start | Lose | Silence | Count


@dataclass(frozen=True)
class Traffic:
    """What agents have sent and received; both are messages of the server."""

    messages: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.messages + other.messages, self.bytes + other.bytes)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.messages - other.messages, self.bytes - other.bytes)


@dataclass(frozen=True)
class Met:
    """All live agents of this process are in the same round."""

    round: int
    nodes: int
    time: float
    """Of the last one, by the machine's monotonic clock."""


@dataclass(frozen=True)
class Noticed:
    """All live agents of this process know that a peer of this round is lost."""

    round: int
    time: float


@dataclass(frozen=True)
class Failed:
    why: str


Event = Met | Noticed | Failed | Traffic


class SimulatedAgent(asyncio.Protocol):
    """One agent: it connects, authenticates, enters the job, joins a round and sends heartbeats."""

    def __init__(self, number: int, fleet: Fleet) -> None:
        self.number, self._fleet = number, fleet
        self.round = 0
        """Of the last assignment."""
        self.is_live = True
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._session: SignedSession | None = None
        self._step: Callable[[], bool] = self._read_greeting
        self._requests = self._entering = self._joining = 0
        self._handshake = ClientHandshake(SERVICE, fleet.secret, f"node-{number}")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._fleet.bytes += len(data)
        self._received += data
        while self._step():
            pass

    def connection_lost(self, error: Exception | None) -> None:
        if not self.is_live:
            return
        if self._session is None:  # it takes so many connections at a time; the real client tries again, too
            self._received.clear()
            self._step = self._read_greeting
            self._fleet.connect(self, RETRY_INTERVAL)
        else:
            self._fleet.fail(f"the rendezvous has disconnected agent {self.number} ({error})")

    def stop(self, close: bool) -> None:
        self.is_live = False
        if close and self._transport is not None:
            self._transport.abort()

    def _write(self, data: bytes) -> None:
        self._fleet.bytes += len(data)
        self._transport.write(data)

    def _take(self, count: int) -> bytes | None:
        if len(self._received) < count:
            return None
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken

    def _read_greeting(self) -> bool:
        if (greeting := self._take(GREETING_BYTES)) is None:
            return False
        self._write(self._handshake.hello(greeting))
        self._step = self._read_welcome
        return True

    def _read_welcome(self) -> bool:
        if (welcome := self._take(WELCOME_BYTES)) is None:
            return False
        try:
            self._session = self._handshake.session(welcome)
        except TamperedError as error:
            self._fleet.fail(f"the rendezvous {error}")
            return False
        high, low = divmod(self.number, 250)
        own = OwnNode(f"10.{high // 250}.{high % 250}.{low + 1}", pid=1, procs=RANKS_PER_NODE)
        self._entering = self._send_fields(Enter, {"job": JOB, "rules": self._fleet.rules, "node": asdict(own)})
        self._step = self._read_message
        asyncio.get_running_loop().call_later(random.uniform(0, HEARTBEAT_INTERVAL), self._beat)
        return True

    def _beat(self) -> None:
        if self.is_live:
            self._send(Ping())
            asyncio.get_running_loop().call_later(HEARTBEAT_INTERVAL, self._beat)

    def _send(self, request: RendezvousRequest) -> int:
        return self._send_fields(type(request), asdict(request))

    def _send_fields(self, request: type[RendezvousRequest], fields: dict[str, Any]) -> int:
        self._requests += 1
        self._fleet.messages += 1
        self._write(self._session.seal({"id": self._requests, "op": request.__name__, **fields}))
        return self._requests

    def _read_message(self) -> bool:
        if len(self._received) < LENGTH_BYTES:
            return False
        length = frame_length(bytes(self._received[:LENGTH_BYTES]))
        if (frame := self._take(LENGTH_BYTES + length)) is None:
            return False
        self._fleet.messages += 1
        message = parse_record(ServerMessage, self._session.open(frame[LENGTH_BYTES:]), "message")
        if message.error is not None:
            self._fleet.fail(f"agent {self.number}: {message.error}")
        elif message.status is not None and self.is_live and self.round:
            if message.status.lost:
                self._fleet.noticed(self)
            if (message.status.lost or message.status.change) and not self._joining:
                self._join(failed=bool(message.status.lost))
        elif message.id == self._entering:
            self._join(failed=False)
        elif message.id == self._joining and self._joining:
            self._joining = 0
            assignment = parse_record(RankAssignment, message.value, "assignment")
            self.round = assignment.round
            self._fleet.met(self, assignment)
        return True

    def _join(self, failed: bool) -> None:
        self._joining = self._send(JoinNextRound(port=40000, failed=failed))


class Fleet:
    """The agents of one process, and the pipe through which the scale model commands them."""

    def __init__(self, endpoint: str, secret: str, settings: RendezvousSettings, pipe: Connection) -> None:
        self.secret, self.rules = secret.encode(), asdict(settings)
        host, _, port = endpoint.rpartition(":")
        self._address, self._pipe = (host, int(port)), pipe
        self.agents: dict[int, SimulatedAgent] = {}
        self.messages = self.bytes = self._live = 0
        self._met: Counter[int] = Counter()
        self._noticed: dict[int, set[int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            try:
                self._obey(self._pipe.recv())
            except (EOFError, OSError):
                loop.remove_reader(self._pipe.fileno())
                closed.set()

        loop.add_reader(self._pipe.fileno(), read)
        await closed.wait()
        for agent in self.agents.values():
            agent.stop(close=True)

    def fail(self, why: str) -> None:
        with suppress(BrokenPipeError):  # the scale model has ended
            self._pipe.send(Failed(why))

    def met(self, agent: SimulatedAgent, assignment: RankAssignment) -> None:
        self._met[assignment.round] += 1
        if self._met[assignment.round] == self._live:
            self._pipe.send(Met(assignment.round, assignment.nodes, time.monotonic()))

    def noticed(self, agent: SimulatedAgent) -> None:
        seen = self._noticed.setdefault(agent.round, set())
        if agent.number not in seen:
            seen.add(agent.number)
            if len(seen) == self._live:
                self._pipe.send(Noticed(agent.round, time.monotonic()))

    def _obey(self, command: Command) -> None:
        match command:
            case Start():
                self._start(command)
            case Lose(number) | Silence(number):
                self._live -= 1
                self.agents[number].stop(close=isinstance(command, Lose))
            case Count():
                self._pipe.send(Traffic(self.messages, self.bytes))

    def _start(self, command: Start) -> None:
        for number in command.numbers:
            self.agents[number] = SimulatedAgent(number, self)
            self._live += 1
            self.connect(self.agents[number], random.uniform(0, command.over))

    def connect(self, agent: SimulatedAgent, delay: float) -> None:
        task = asyncio.create_task(self._connect(agent, delay))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, agent: SimulatedAgent, delay: float) -> None:
        await asyncio.sleep(delay)
        try:
            await asyncio.get_running_loop().create_connection(lambda: agent, *self._address)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.EADDRNOTAVAIL):
                self.fail(f"agent {agent.number} cannot connect: {error}")
            else:
                self.connect(agent, RETRY_INTERVAL)


def run_fleet(endpoint: str, secret: str, settings: RendezvousSettings, pipe: Connection) -> None:
    """The main function of a process of agents: until the pipe is closed."""
    watch_parent()
    raise_descriptor_limit()
    try:
        asyncio.run(Fleet(endpoint, secret, settings, pipe).run())
    except Z2aError as error:
        pipe.send(Failed(str(error)))
