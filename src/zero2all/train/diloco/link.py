"""How islands reach each other: each rank pulls what it needs from its counterparts on the other islands.

Connections are made as in ``checkpoint.peers``: both sides prove that they know the secret, and every block is
signed. There is no process group over islands, which a lost one could hang.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from zero2all.base.console import say
from zero2all.base.errors import Interrupted, Z2aError
from zero2all.base.network.addresses import local_address_for
from zero2all.base.network.connection import Address, Connection, TamperedError
from zero2all.checkpoint import RankGroup
from zero2all.checkpoint.peers import PeerServer, connect_peer
from zero2all.cluster.launch.islands.client import GivenUpError, IslandClient
from zero2all.cluster.launch.islands.messages import Addresses, EnterIslands, QuorumAnswer, StartAnswer

FETCH_TIMEOUT = 5.0  # seconds without a byte after which a part counts as out of reach
POLL_INTERVAL = 0.2  # seconds between two requests for a state that is not there yet
STATE_PATIENCE = 600.0  # seconds for the other island to reach the step at which it gives its state
Kind = Literal["delta", "state"]
T = TypeVar("T")


@dataclass(frozen=True)
class IslandPlace:
    """Which island this process belongs to, and where all islands meet."""

    island: int
    islands: int
    endpoint: str
    """HOST:PORT of a rendezvous."""
    secret: str


@dataclass(frozen=True)
class PartRequest:
    kind: Kind
    exchange: int


@dataclass(frozen=True)
class PartReply:
    is_there: bool
    bytes: int = 0
    step: int = 0
    """Steps done, of a state."""


@dataclass(frozen=True)
class CompletedExchange:
    """A complete exchange."""

    parts: list[Tensor]
    """What each member sent, in the order of islands."""
    members: list[int]
    bytes: int
    """Bytes that this rank has sent and received."""
    has_recipients: bool
    """Whether another island takes the state of this one after this exchange."""


Missed = Literal["behind", "given up"]
"""``behind``: the others have completed it without this island. ``given up``: this process was asked to stop."""


class IslandLink(Protocol):
    """Called on all ranks of an island at the same time; the answers are the same on all of them."""

    def start(self, exchange: int, digest: str) -> StartAnswer: ...

    def exchange(self, number: int, last: int, part: Tensor) -> CompletedExchange | Missed:
        """Send and receive the parts of an exchange; ``last`` is the one before. May be called in a thread."""

    def publish_state(self, exchange: int, step: int, tensors: Sequence[Tensor]) -> None: ...

    def fetch_state(self, answer: StartAnswer, tensors: Sequence[Tensor]) -> int | None:
        """Fill ``tensors``; the steps that the state has. None if the other island is gone."""

    def gather(self, own: str, summarize: Callable[[list[str]], str]) -> str:
        """The summary over all ranks of this island."""

    def close(self, *, is_done: bool) -> None: ...


class PartServer(PeerServer):
    """Gives counterparts what this rank has published, one part of each kind at a time."""

    niceness = 0  # their training waits for it

    def __init__(self, host: str, secret: bytes) -> None:
        self._parts: dict[Kind, tuple[int, int, Tensor]] = {}
        super().__init__(host, secret)

    def publish(self, kind: Kind, exchange: int, data: Tensor, step: int = 0) -> None:
        self._parts[kind] = (exchange, step, data)

    def withdraw(self, kind: Kind) -> None:
        self._parts.pop(kind, None)

    def answer(self, peer: Connection) -> None:
        request = peer.receive(PartRequest)
        exchange, step, data = self._parts.get(request.kind, (None, 0, torch.empty(0, dtype=torch.uint8)))
        if exchange != request.exchange:
            peer.send(PartReply(is_there=False))
            return
        peer.send(PartReply(True, len(data), step))
        peer.send_bytes(data.numpy().data)


def fetch_part(
    address: Address, secret: bytes, request: PartRequest, size: int, on_block: Callable[[], None] = lambda: None
) -> tuple[Tensor, int] | None:
    """The bytes, and the step of a state; None if they are not there yet. ``on_block`` is called while they arrive."""
    with connect_peer(address, secret, FETCH_TIMEOUT, FETCH_TIMEOUT) as peer:
        peer.send(request)
        reply = peer.receive(PartReply)
        if not reply.is_there:
            return None
        if reply.bytes != size:
            raise TamperedError(f"it offers {reply.bytes} bytes, not {size}")
        data = torch.empty(size, dtype=torch.uint8)
        peer.receive_bytes(data.numpy().data, on_block)
        return data, reply.step


class NetworkLink:
    """An ``IslandLink`` over TCP."""

    def __init__(
        self,
        place: IslandPlace,
        training: str,
        identity: dict[str, str],
        ranks: RankGroup,
        *,
        patience: float,
        on_wait: Callable[[], None] = lambda: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """``ranks`` is used by nothing else. ``patience``: seconds that a start waits for all islands."""
        self.place, self._ranks, self._on_wait, self._is_stopping = place, ranks, on_wait, is_stopping
        self._secret = place.secret.encode()
        self._server = PartServer(local_address_for(place.endpoint), self._secret)
        address = self._server.address
        # Rank 0 speaks for the island; the others get the addresses of other islands from it.
        addresses: Addresses = ranks.scatter(
            lambda: (address.host, address.port), lambda found: [found, *[list[tuple[str, int]]()] * (len(found) - 1)]
        )
        own = EnterIslands(training, place.island, place.islands, identity, addresses, patience)
        self._client = IslandClient(place.endpoint, place.secret, own, on_wait, is_stopping)

    def start(self, exchange: int, digest: str) -> StartAnswer:
        answer = self._ranks.on_rank0(lambda: self._ask(lambda: self._client.start(exchange, digest)), self._on_wait)
        if answer is None:
            raise Interrupted("stopped while waiting for the other islands; the same command resumes")
        return answer

    def _ask(self, question: Callable[[], T]) -> T | None:
        """What the rendezvous answers; None if this process was asked to stop while it waited."""
        try:
            return question()
        except GivenUpError:
            return None

    def exchange(self, number: int, last: int, part: Tensor) -> CompletedExchange | Missed:
        self._server.publish("delta", number, part)  # before any island is told that it may fetch
        while (outcome := self._attempt(number, last, part)) is None:
            pass
        if isinstance(outcome, CompletedExchange):
            self._server.withdraw("state")  # who was to take it has offered its part of this exchange
        return outcome

    def _attempt(self, number: int, last: int, part: Tensor) -> CompletedExchange | Missed | None:
        """None if it must be repeated."""
        quorum = self._ranks.on_rank0(lambda: self._ask(lambda: self._client.ready(number, last)))
        if quorum is None:
            return "given up"
        if quorum.is_behind:
            return "behind"
        parts, own_failed = self._fetch_parts(quorum, number, part)
        failed = sorted(self._ranks.reduce(lambda: set(own_failed), operator.or_))
        outcome = self._ranks.on_rank0(lambda: self._ask(lambda: self._client.report(number, quorum.attempt, failed)))
        if outcome is None:
            return "given up"
        if not outcome.is_complete:
            return None
        sent, received = len(part) * (len(parts) - 1), sum(map(len, parts.values())) - len(part)
        ordered = [parts[island] for island in sorted(parts)]
        return CompletedExchange(ordered, sorted(parts), sent + received, bool(outcome.recipients))

    def _fetch_parts(self, quorum: QuorumAnswer, number: int, own: Tensor) -> tuple[dict[int, Tensor], list[int]]:
        parts, failed = {self.place.island: own}, []
        for island, addresses in quorum.members.items():
            if island == self.place.island:
                continue
            try:
                address = Address(*addresses[self._ranks.rank])
                found = fetch_part(address, self._secret, PartRequest("delta", number), len(own))
            except (OSError, TamperedError, Z2aError, IndexError) as error:
                say(f"island {island} is out of reach: {error}")
                found = None
            if found is None:
                failed.append(island)
            else:
                parts[island] = found[0]
        return parts, failed

    def publish_state(self, exchange: int, step: int, tensors: Sequence[Tensor]) -> None:
        self._server.publish("state", exchange, torch.cat([tensor.view(torch.uint8) for tensor in tensors]), step)

    def fetch_state(self, answer: StartAnswer, tensors: Sequence[Tensor]) -> int | None:
        found = self._poll_state(answer, sum(tensor.nbytes for tensor in tensors))
        # Shards of other ranks may arrive much later than this one's.
        steps = self._ranks.reduce(lambda: {None if found is None else found[1]}, operator.or_, self._on_wait)
        if found is None or len(steps) > 1:
            return None
        at = 0
        for tensor in tensors:
            tensor.copy_(found[0][at : at + tensor.nbytes].view(tensor.dtype))
            at += tensor.nbytes
        return found[1]

    def _poll_state(self, answer: StartAnswer, size: int) -> tuple[Tensor, int] | None:
        deadline = time.monotonic() + STATE_PATIENCE
        while time.monotonic() < deadline and not self._is_stopping():
            try:
                address = Address(*answer.addresses[self._ranks.rank])
                request = PartRequest("state", answer.exchange)
                found = fetch_part(address, self._secret, request, size, self._on_wait)
            except (OSError, TamperedError, Z2aError, IndexError) as error:
                say(f"the state of island {answer.source} is out of reach: {error}")
                return None
            if found is not None:
                return found
            self._on_wait()
            time.sleep(POLL_INTERVAL)
        return None

    def gather(self, own: str, summarize: Callable[[list[str]], str]) -> str:
        return self._ranks.gather(lambda: own, summarize)

    def close(self, *, is_done: bool) -> None:
        self._client.close(is_done=is_done)
        self._server.close()
