"""Sends each committed state of this rank to the ranks that keep its replicas, in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zero2all.base.console import say, warn
from zero2all.base.errors import Z2aError
from zero2all.base.network.connection import Address, TamperedError
from zero2all.base.units import show_bytes
from zero2all.checkpoint.background import run_in_background
from zero2all.checkpoint.flash import Slot
from zero2all.checkpoint.peers import connect_peer
from zero2all.checkpoint.replica_server import RejectedStateError, ReplicaRequest, Reply
from zero2all.checkpoint.slot_format import LAYOUT_FILE, SlotHeader
from zero2all.checkpoint.training_state import SentReplica


class RateLimit:
    """A token bucket: ``take`` sleeps until that many bytes may be sent. None: no limit."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate, self._free_at = bytes_per_second, time.monotonic()

    def take(self, count: int) -> None:
        if self._rate is None:
            return
        now = time.monotonic()
        # A pause earns no burst: the link is shared with gradients.
        begin = max(now, self._free_at)
        self._free_at = begin + count / self._rate
        if begin > now:
            time.sleep(begin - now)


class _OverwrittenError(Exception):
    """Training went on: the slot now holds another state."""


@dataclass(frozen=True)
class _Offer:
    slot: Slot
    header: SlotHeader
    time: float


class ReplicaSender:
    """Sends states without making training wait: a state that is overwritten before it was sent is given up.

    >>> sender = ReplicaSender(rank=0, world_size=8, holders=[address], secret=secret, rate=RateLimit(None))
    >>> sender.offer(slot)   # once it is committed
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        holders: Sequence[Address],
        secret: bytes,
        rate: RateLimit,
        on_sent: Callable[[SentReplica], None] = lambda sent: None,
    ) -> None:
        self._rank, self._world_size, self._holders, self._secret = rank, world_size, holders, secret
        self._rate, self._on_sent = rate, on_sent
        self._changed = threading.Condition()
        self._waiting: _Offer | None = None
        self._newest: _Offer | None = None
        self._running = self._closed = False
        self._failing = self._slow = False
        self.skipped = 0
        """States that were given up, since sending earlier ones took too long."""

    def offer(self, slot: Slot) -> None:
        """Send this state, after the one that is being sent; one that waits for that meanwhile is skipped."""
        if slot.header is None:
            return  # it could not be committed
        offer = _Offer(slot, slot.header, time.monotonic())
        with self._changed:
            if self._closed:
                return
            if self._waiting is not None:
                self.skipped += 1
            previous, self._newest, self._waiting = self._newest, offer, offer
            if self._running:
                if previous is not None:
                    self._warn_slow(offer.time - previous.time)
                return
            self._running = True
        run_in_background(self._send_waiting)

    def wait(self, timeout: float) -> bool:
        """Return whether everything offered was sent, or given up, within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout)

    def close(self) -> None:
        with self._changed:
            self._closed, self._waiting = True, None

    def _send_waiting(self) -> None:
        while True:
            with self._changed:
                offer, self._waiting = self._waiting, None
                if offer is None:
                    self._running = False
                    self._changed.notify_all()
                    return
            self._send_to_all(offer)

    def _send_to_all(self, offer: _Offer) -> None:
        begin, count = time.monotonic(), 0
        try:
            for address in self._holders:
                count += self._send(offer, address)
        except _OverwrittenError:
            with self._changed:
                self.skipped += 1
            return
        except (OSError, Z2aError, TamperedError) as error:
            if not self._failing and not self._closed:
                warn(
                    f"no replica of the state of step {offer.header.step} on another node: {error}; until one "
                    "succeeds, the loss of this node costs the steps since the last durable checkpoint",
                    every_rank=True,
                )
            self._failing = True
            return
        if self._failing:
            self._failing = False
            say(f"replicas work again: the state of step {offer.header.step} is on another node")
        assert self._newest is not None
        lag = max(0, self._newest.header.step - offer.header.step)
        self._on_sent(SentReplica(offer.header.step, count, time.monotonic() - begin, lag))

    def _send(self, offer: _Offer, address: Address) -> int:
        header, slot = offer.header, offer.slot
        assert slot.path is not None
        layout, data = memoryview(slot.path.with_name(LAYOUT_FILE).read_bytes()), slot.data.numpy().data

        def before_block(count: int) -> None:
            if slot.header is not header:
                raise _OverwrittenError
            if self._closed:
                raise OSError("this rank is ending")
            self._rate.take(count)

        before_block(0)
        with connect_peer(address, self._secret) as peer:
            history = header.lineage[-1].history
            sizes = (len(layout), len(data))
            peer.send(ReplicaRequest("store", self._rank, self._world_size, header.step, history, *sizes, header))
            _raise_problem(peer.receive(Reply), address)  # before anything is sent for nothing
            peer.send_bytes(layout, before_block)
            peer.send_bytes(data, before_block)
            reply = peer.receive(Reply)
        if slot.header is not header:  # overwritten while its last block was sent: that is why it was rejected
            raise _OverwrittenError
        _raise_problem(reply, address)
        return len(layout) + len(data)

    def _warn_slow(self, interval: float) -> None:
        """A lost node is restored from a state that *all* of its replicas and all other ranks still have."""
        if not self._slow:
            self._slow = True
            assert self._newest is not None
            size = show_bytes(self._newest.slot.data.numel())
            warn(
                f"sending a replica ({size}) takes longer than the {interval:.1f} s between two in-memory "
                "checkpoints, so some states have none: a larger checkpoint.flash_every, or "
                "checkpoint.replica_rate, protects better",
                every_rank=True,
            )


def _raise_problem(reply: Reply, address: Address) -> None:
    if reply.problem is not None:
        raise RejectedStateError(f"{address.host} replied: {reply.problem}")
