"""What islands serve each other, and peers that are hostile, broken or slow."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.train.diloco.island_threads import SECRET
from zero2all.base.errors import Interrupted, UsageError, Z2aError
from zero2all.base.network.connection import Address, Connection, TamperedError
from zero2all.checkpoint import RankGroup
from zero2all.checkpoint.peers import PeerServer, connect_peer
from zero2all.cluster.launch.islands.client import IslandClient
from zero2all.cluster.launch.islands.messages import EnterIslands
from zero2all.cluster.launch.rendezvous_client import WrongSecretError
from zero2all.cluster.launch.rendezvous_server import RendezvousServer
from zero2all.train.diloco import link as island_link
from zero2all.train.diloco.link import (
    CompletedExchange,
    IslandPlace,
    NetworkLink,
    PartReply,
    PartRequest,
    PartServer,
    fetch_part,
)

PART = torch.arange(3 << 20, dtype=torch.int64).to(torch.uint8)[: (2 << 20) + 5]  # several blocks
DELTA = PartRequest("delta", 8)


@pytest.fixture
def server() -> Iterator[PartServer]:
    server = PartServer("127.0.0.1", SECRET.encode())
    server.publish("delta", 8, PART)
    yield server
    server.close()


def test_a_counterpart_gets_what_was_published_and_nothing_else(server: PartServer) -> None:
    found = fetch_part(server.address, SECRET.encode(), DELTA, len(PART))
    assert found is not None
    assert torch.equal(found[0], PART)
    assert fetch_part(server.address, SECRET.encode(), PartRequest("delta", 9), len(PART)) is None
    assert fetch_part(server.address, SECRET.encode(), PartRequest("state", 8), len(PART)) is None


def test_a_counterpart_is_served_with_the_priority_of_training() -> None:
    seen: list[int] = []

    class Observed(PartServer):
        def answer(self, peer: Connection) -> None:
            seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            super().answer(peer)

    server = Observed("127.0.0.1", SECRET.encode())
    assert fetch_part(server.address, SECRET.encode(), DELTA, len(PART)) is None
    server.close()
    assert seen == [os.getpriority(os.PRIO_PROCESS, os.getpid())]


def test_a_wrong_secret_gets_nothing(server: PartServer) -> None:
    with pytest.raises(TamperedError, match="another job secret"):
        fetch_part(server.address, b"guessed", DELTA, len(PART))


def test_a_request_that_is_none_is_answered_with_the_end_of_the_connection(server: PartServer) -> None:
    with connect_peer(server.address, SECRET.encode()) as peer:
        peer.send(PartReply(is_there=True))
        with pytest.raises(OSError, match="closed"):
            peer.receive(PartReply)
    assert fetch_part(server.address, SECRET.encode(), DELTA, len(PART)) is not None


class HostilePeer(PeerServer):
    """Knows the secret, and answers what it likes."""

    def __init__(self, reply: PartReply, data: torch.Tensor) -> None:
        self.reply, self.data = reply, data
        super().__init__("127.0.0.1", SECRET.encode())

    def answer(self, peer: Connection) -> None:
        peer.receive(PartRequest)
        peer.send(self.reply)
        peer.send_bytes(self.data.numpy().data)
        time.sleep(2)


@pytest.mark.parametrize("size", [10, len(PART) - 1, len(PART) + 1, 1 << 62])
def test_a_part_of_another_size_is_refused_before_memory_is_taken_for_it(size: int) -> None:
    hostile = HostilePeer(PartReply(True, size), PART)
    with pytest.raises(TamperedError, match=rf"{size} bytes, not {len(PART)}"):
        fetch_part(hostile.address, SECRET.encode(), DELTA, len(PART))
    hostile.close()


def test_a_peer_that_stops_half_way_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(island_link, "FETCH_TIMEOUT", 0.5)
    hostile = HostilePeer(PartReply(True, len(PART)), PART[: 1 << 20])
    with pytest.raises(OSError, match="timed out"):
        fetch_part(hostile.address, SECRET.encode(), DELTA, len(PART))
    hostile.close()
    with pytest.raises(OSError, match="refused"):
        fetch_part(Address("127.0.0.1", 1), SECRET.encode(), DELTA, len(PART))


@pytest.fixture
def rendezvous() -> Iterator[RendezvousServer]:
    server = RendezvousServer("127.0.0.1", 0, SECRET)
    server.start()
    yield server
    server.stop()


def link(rendezvous: RendezvousServer, island: int, islands: int, **options: Any) -> NetworkLink:
    place = IslandPlace(island, islands, rendezvous.endpoint, SECRET)
    return NetworkLink(place, "run", {"recipe": "r"}, RankGroup(), patience=30, **options)


def together(*functions: object) -> list[object]:
    results: list[object] = [None] * len(functions)

    def call(number: int) -> None:
        results[number] = functions[number]()  # type: ignore[operator]

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@contextmanager
def started(rendezvous: RendezvousServer, islands: int = 2, **first: Any) -> Iterator[list[NetworkLink]]:
    """All of them. ``first``: of the first one alone."""
    links = [link(rendezvous, number, islands, **({} if number else first)) for number in range(islands)]
    together(*[lambda own=own: own.start(-1, "d") for own in links])
    yield links
    for own in links:
        own.close(is_done=False)


def test_three_islands_get_the_same_parts_in_the_same_order(rendezvous: RendezvousServer) -> None:
    parts = [torch.full((5,), number, dtype=torch.uint8) for number in range(3)]
    with started(rendezvous, islands=3) as links:
        found = together(
            *[lambda own=own, part=part: own.exchange(4, -1, part) for own, part in zip(links, parts, strict=True)]
        )
    for exchanged in found:
        assert isinstance(exchanged, CompletedExchange)
        assert exchanged.members == [0, 1, 2]
        assert torch.equal(torch.cat(exchanged.parts), torch.cat(parts))
        assert exchanged.bytes == 20


def test_a_part_out_of_reach_leaves_its_island_out_and_it_hears_of_that(rendezvous: RendezvousServer) -> None:
    """An island that is alive, and whose ranks nobody can connect to."""
    with started(rendezvous) as (one, other):
        other._server.close()
        part = torch.ones(5, dtype=torch.uint8)
        found = together(lambda: one.exchange(4, -1, part), lambda: other.exchange(4, -1, part))
    assert isinstance(found[0], CompletedExchange)
    assert found[0].members == [0]
    assert found[1] == "behind"


def test_an_island_whose_connection_closes_is_not_waited_for(
    rendezvous: RendezvousServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was killed: its connection is closed, with no word of leaving."""
    # The other rule, which would find it 8 s later:
    monkeypatch.setattr("zero2all.cluster.launch.islands.quorum.SILENT_AFTER", 1000.0)
    with started(rendezvous) as (one, other):
        other.close(is_done=False)
        found = one.exchange(4, -1, torch.ones(5, dtype=torch.uint8))
    assert isinstance(found, CompletedExchange)
    assert found.members == [0]


def test_a_process_that_must_stop_does_not_wait_for_others(
    rendezvous: RendezvousServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero2all.cluster.launch.islands.client.STOP_PATIENCE", 0.2)
    stopping = threading.Event()
    with started(rendezvous, is_stopping=stopping.is_set) as (one, other):
        stopping.set()
        assert one.exchange(4, -1, torch.ones(5, dtype=torch.uint8)) == "given up"
        exchanged = other.exchange(4, -1, torch.ones(5, dtype=torch.uint8))  # goes on without it
        assert isinstance(exchanged, CompletedExchange)
        assert exchanged.members == [1]
        with pytest.raises(Interrupted, match="stopped while waiting"):
            one.start(-1, "d")


def test_the_rendezvous_may_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.cluster.launch.islands.client.RETRY_INTERVAL", 0.05)
    first = RendezvousServer("127.0.0.1", 0, SECRET)
    first.start()
    with started(first) as links:
        first.stop()
        second = RendezvousServer("127.0.0.1", first.address.port, SECRET)
        second.start()
        part = torch.ones(5, dtype=torch.uint8)
        found = together(*[lambda own=own: own.exchange(4, -1, part) for own in links])
    members = [exchanged.members if isinstance(exchanged, CompletedExchange) else exchanged for exchanged in found]
    # Whoever comes first may find itself alone at the new rendezvous; the other is told then.
    assert members in ([[0, 1], [0, 1]], [[0], "behind"], ["behind", [1]])
    second.stop()


def test_without_a_rendezvous_an_island_gives_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.cluster.launch.islands.client.CONNECT_PATIENCE", 0.2)
    monkeypatch.setattr("zero2all.cluster.launch.islands.client.ANSWER_TIMEOUT", 0.2)
    own = EnterIslands("run", 0, 2, {}, [], 1.0)
    with pytest.raises(Z2aError, match="start 'z2a launch --rendezvous-only' there"):
        IslandClient("127.0.0.1:1", SECRET, own).start(-1, "d")


def test_the_rendezvous_refuses_strangers_and_twins(
    rendezvous: RendezvousServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = EnterIslands("run", 0, 2, {}, [], 0.1)
    with pytest.raises(WrongSecretError):
        IslandClient(rendezvous.endpoint, "a wrong secret", own).start(-1, "d")
    first = IslandClient(rendezvous.endpoint, SECRET, own)
    first.start(-1, "d")
    monkeypatch.setattr("zero2all.cluster.launch.islands.client.TAKEN_PATIENCE", 0.0)
    with pytest.raises(UsageError, match="island 0 is there already"):
        IslandClient(rendezvous.endpoint, SECRET, own).start(-1, "d")
    first.close(is_done=False)
