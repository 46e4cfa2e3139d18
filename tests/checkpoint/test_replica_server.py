"""A rank that listens for replicas, and peers that are hostile, broken or slow."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoint.helpers import TRAINING_STATE
from zero2all.base.network import connection
from zero2all.base.network.connection import (
    GREETING_BYTES,
    HELLO_BYTES,
    REFUSED,
    Address,
    Connection,
    TamperedError,
    receive_exactly,
)
from zero2all.checkpoint import replica_sender, replica_server
from zero2all.checkpoint.flash import Slot, Slots
from zero2all.checkpoint.peers import connect_peer
from zero2all.checkpoint.replica_sender import RateLimit, ReplicaSender
from zero2all.checkpoint.replica_server import (
    RejectedStateError,
    ReplicaRequest,
    ReplicaServer,
    ReplicaSlots,
    Reply,
    fetch_state,
)
from zero2all.checkpoint.slot_format import SlotHeader
from zero2all.checkpoint.staged_slot import find_staged_slots
from zero2all.checkpoint.training_state import Branch, Lineage, SentReplica

SECRET = b"correct horse battery staple"
LINE: Lineage = (Branch("a", 0),)
TENSORS = {"model.weight": torch.arange(1 << 19, dtype=torch.float32)}  # 2 MB: several blocks
SIZE = TENSORS["model.weight"].nbytes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReplicaServer]:
    server = ReplicaServer("127.0.0.1", SECRET, tmp_path / "there")
    server.hold({(0, 2): ReplicaSlots(tmp_path / "there" / "replica-0-of-2", SIZE)})
    yield server
    server.close()


@pytest.fixture
def slots(tmp_path: Path) -> Slots:
    return Slots(TENSORS, tmp_path / "here" / "rank-0-of-2")


def committed(slots: Slots, step: int, lineage: Lineage = LINE) -> Slot:
    slot = slots.stage(step, lineage, TENSORS, TRAINING_STATE, lambda: True)
    slots.wait()
    return slot


def sender(address: Address, secret: bytes = SECRET, rate: float | None = None) -> tuple[ReplicaSender, list[Any]]:
    sent: list[SentReplica] = []
    return ReplicaSender(0, 2, [address], secret, RateLimit(rate), sent.append), sent


def offered(out: ReplicaSender, slots: Slots, step: int) -> Slot:
    """A state that was offered, and sent if that is possible."""
    slot = committed(slots, step)
    out.offer(slot)
    assert out.wait(30)
    return slot


def steps_held(place: Path) -> list[int]:
    return sorted(slot.header.step for slot in find_staged_slots(place) if slot.problem() is None)


def test_a_committed_state_arrives_and_is_equal(server: ReplicaServer, slots: Slots, tmp_path: Path) -> None:
    out, sent = sender(server.address)
    for step in (10, 20, 30):
        slot = offered(out, slots, step)
    assert [(replica.step, replica.lag) for replica in sent] == [(10, 0), (20, 0), (30, 0)]
    assert sent[0].bytes > SIZE
    assert steps_held(tmp_path / "there") == [20, 30], "two slots, and the older one was overwritten"
    [held] = [slot for slot in find_staged_slots(tmp_path / "there") if slot.header.step == 30]
    assert held.replica
    assert held.header == slot.header
    assert held.data.read_bytes() == slot.data.numpy().tobytes()
    assert held.shard_specs() == slots.shard_specs
    request = ReplicaRequest("fetch", 0, 2, 30, "a")
    fetch_state(server.address, SECRET, request, tmp_path / "third" / "rank-0-of-2", slot.data.numel())
    assert steps_held(tmp_path / "third") == [30]
    with pytest.raises(RejectedStateError, match="not held"):
        fetch_state(server.address, SECRET, replace(request, step=40), tmp_path / "x", slot.data.numel())
    with pytest.raises(RejectedStateError, match="not 7"):
        fetch_state(server.address, SECRET, request, tmp_path / "x", 7)


def test_a_peer_with_another_secret_gets_and_leaves_nothing(
    server: ReplicaServer, slots: Slots, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, sent = sender(server.address, secret=b"wrong horse battery staple")
    offered(out, slots, 10)
    assert sent == []
    assert "another job secret" in capsys.readouterr().err
    with pytest.raises(TamperedError, match="another job secret"):
        fetch_state(server.address, b"x" * 32, ReplicaRequest("fetch", 0, 2, 10, "a"), tmp_path / "x", SIZE)
    assert steps_held(tmp_path / "there") == []


def layout_of(slot: Slot) -> bytes:
    return slot.path.with_name("layout.json").read_bytes()


def store(slot: Slot, **changes: Any) -> ReplicaRequest:
    request = ReplicaRequest("store", 0, 2, 10, "a", len(layout_of(slot)), slot.data.numel(), slot.header)
    return replace(request, **changes)


@contextmanager
def storing(server: ReplicaServer, slot: Slot) -> Iterator[Connection]:
    """A peer that may send a state."""
    with connect_peer(server.address, SECRET) as peer:
        peer.send(store(slot))
        assert peer.receive(Reply).problem is None
        yield peer


def refused(server: ReplicaServer, request: ReplicaRequest) -> str:
    with connect_peer(server.address, SECRET) as peer:
        peer.send(request)
        reply = peer.receive(Reply)
        return reply.problem


def test_a_rank_takes_only_what_was_agreed_on(server: ReplicaServer, slots: Slots, tmp_path: Path) -> None:
    slot = committed(slots, 10)
    assert "no replicas of rank 1" in refused(server, store(slot, rank=1))
    assert "no replicas of rank -1" in refused(server, store(slot, rank=-1))
    assert "no replicas of rank 0 of 3" in refused(server, store(slot, world_size=3))
    assert "do not fit" in refused(server, store(slot, data_bytes=1 << 60))
    assert "do not fit" in refused(server, store(slot, layout_bytes=1 << 60))
    assert "do not fit" in refused(server, store(slot, header=None))
    with connect_peer(server.address, SECRET) as peer:  # a path where a number belongs
        peer.socket.sendall(peer.session.seal({**asdict(store(slot)), "rank": "../../etc"}))
        with pytest.raises(OSError, match="closed"):
            peer.receive(Reply)
    assert steps_held(tmp_path / "there") == []
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"replica-0-of-2"}


def send_parts(peer: Connection, slot: Slot, header: SlotHeader | None, layout: bytes, data: memoryview) -> str | None:
    peer.send(store(slot, layout_bytes=len(layout), header=header))
    assert peer.receive(Reply).problem is None
    peer.send_bytes(memoryview(layout))
    peer.send_bytes(data)
    return peer.receive(Reply).problem


def test_a_state_that_does_not_match_its_checksum_or_layout_is_rejected(
    server: ReplicaServer, slots: Slots, tmp_path: Path
) -> None:
    slot = committed(slots, 10)
    layout = layout_of(slot)
    flipped = slot.data.clone()
    flipped[12345] ^= 1
    with connect_peer(server.address, SECRET) as peer:
        assert "checksum" in str(send_parts(peer, slot, slot.header, layout, flipped.numpy().data))
    assert steps_held(tmp_path / "there") == []
    [spec] = json.loads(layout)
    for change in ({"dtype": "load"}, {"at": -64}, {"bytes": 1 << 40}, {"sizes": [1 << 62]}, {"offsets": [0, 0]}):
        bad = json.dumps([{**spec, **change}]).encode()
        with connect_peer(server.address, SECRET) as peer, pytest.raises((OSError, AssertionError)):
            assert send_parts(peer, slot, slot.header, bad, slot.data.numpy().data) is None
    assert steps_held(tmp_path / "there") == []


def test_a_rank_that_reconnects_is_served_before_its_lost_connection_is_seen(
    server: ReplicaServer, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    reconnected, real = threading.Event(), replica_server.receive_state

    def receive_slowly(*arguments: Any) -> None:
        try:
            real(*arguments)
        finally:
            reconnected.wait(10)

    monkeypatch.setattr(replica_server, "receive_state", receive_slowly)
    slot = committed(slots, 10)
    with storing(server, slot):
        pass
    with connect_peer(server.address, SECRET) as peer:
        peer.send(store(slot))
        threading.Timer(0.2, reconnected.set).start()
        assert peer.receive(Reply).problem is None


def test_frames_that_are_cut_short_forged_or_replayed_end_the_connection(
    server: ReplicaServer, slots: Slots, tmp_path: Path
) -> None:
    slot = committed(slots, 10)
    with storing(server, slot):  # cut short
        pass
    with connect_peer(server.address, SECRET) as peer:  # forged
        frame = bytearray(peer.session.seal(asdict(store(slot))))
        frame[-1] ^= 1
        peer.socket.sendall(frame)
        with pytest.raises(OSError, match="closed"):
            peer.receive(Reply)
    with storing(server, slot) as peer:  # a block of the layout, twice
        layout = layout_of(slot)
        frame_bytes = peer.session.frame_head(layout) + layout
        peer.socket.sendall(frame_bytes + frame_bytes)
        with pytest.raises(OSError, match=r"closed|reset"):
            peer.receive(Reply)
    with connect_peer(server.address, SECRET) as peer:  # larger than any frame
        peer.socket.sendall((1 << 31).to_bytes(4, "big"))
        with pytest.raises(OSError, match="closed"):
            peer.receive(Reply)
    with socket.create_connection(server.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(HELLO_BYTES))
        assert receive_exactly(stranger, GREETING_BYTES + 1)[-1:] == REFUSED
    assert steps_held(tmp_path / "there") == []
    out, sent = sender(server.address)
    offered(out, slots, 20)
    assert [replica.step for replica in sent] == [20], "and it still serves its peers"


def test_a_dead_peer_costs_a_warning_and_is_tried_again(
    slots: Slots, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = Address("127.0.0.1", gone.getsockname()[1])
    out, sent = sender(address)
    for step in (10, 20):
        begin = time.monotonic()
        out.offer(committed(slots, step))
        assert time.monotonic() - begin < 10, "training does not wait for it"
        assert out.wait(30)
    assert sent == []
    assert capsys.readouterr().err.count("no replica of the state") == 1


def test_a_state_that_training_overwrites_is_given_up(
    server: ReplicaServer, slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BLOCK_BYTES", 1 << 14)
    out, sent = sender(server.address, rate=1 << 16)  # 32 s for a state
    first = committed(slots, 10)
    out.offer(first)
    for step in (20, 30):
        begin = time.monotonic()
        slot = committed(slots, step)
        assert time.monotonic() - begin < 15  # half of what sending the first takes
    assert slot is first
    assert out.wait(30), "it stops as soon as it notices"
    assert (out.skipped, sent) == (1, [])
    assert steps_held(tmp_path / "there") == []


class SlowLock:
    """A lock whose holder loses the processor before it lets go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, timeout: float = -1) -> bool:
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        time.sleep(0.2)
        self._lock.release()


def test_the_next_state_is_received_as_soon_as_one_is_confirmed(
    server: ReplicaServer, slots: Slots, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, (place, _) in server._held.items():
        server._held[key] = (place, SlowLock())  # type: ignore[assignment]
    out, sent = sender(server.address)
    for step in (10, 20):
        offered(out, slots, step)
    assert [replica.step for replica in sent] == [10, 20], capsys.readouterr().err


def test_states_of_an_abandoned_history_are_overwritten_first(slots: Slots, tmp_path: Path) -> None:
    place = ReplicaSlots(tmp_path / "replica-0-of-2", SIZE)
    abandoned: Lineage = (*LINE, Branch("b", 5))
    current: Lineage = (*LINE, Branch("c", 15))
    for step, lineage in ((10, LINE), (40, abandoned), (20, current), (30, current)):
        slot = committed(slots, step, lineage)
        layout, data = layout_of(slot), slot.data.numpy().data

        def fill(target: memoryview, data: memoryview = data) -> None:
            target[:] = data

        place.receive(slot.header, layout, fill)
    assert steps_held(tmp_path) == [20, 30]


def test_the_rate_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(replica_sender, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    limit = RateLimit(100.0)
    for _ in range(11):
        limit.take(50)
    assert clock[0] == pytest.approx(5.0)
    clock[0] += 100.0  # idle time earns no burst
    for _ in range(3):
        limit.take(50)
    assert clock[0] == pytest.approx(106.0)
