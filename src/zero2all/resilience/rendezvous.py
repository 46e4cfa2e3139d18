"""Where the nodes of a job meet: at a rendezvous that one of them holds, or that runs by itself (``z2a rendezvous``).

With one of its own the job survives the loss of any node. Otherwise the node that holds it must stay.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from zero2all.console import say
from zero2all.errors import UsageError, Z2aError
from zero2all.resilience.addresses import (
    LOOPBACK,
    PORT,
    address_towards,
    is_ours,
    must_reach_others,
    own_address,
    resolved,
)
from zero2all.resilience.host import Host
from zero2all.resilience.link import JobEndedError, Link, LinkStore
from zero2all.resilience.rounds import Outcome, Rules, Seat, rules_message
from zero2all.resilience.secret import find_secret, new_secret

JOIN = 600.0  # seconds to wait for enough nodes
_LOOK = 0.5


@dataclass(frozen=True)
class Place:
    """Where and how nodes meet; as on the command line of each of them."""

    endpoint: str | None = None
    """HOST:PORT; None for a job on one node."""
    listen: str | None = None
    """The address that is bound where this node holds it; that of ``endpoint`` if not given."""
    advertise: str | None = None
    """The address by which other nodes reach this one; that from which it reaches the rendezvous if not given."""
    secret_file: Path | None = None
    patience: float = 60.0
    """Seconds for it to answer."""


def serve(port: int = PORT, listen: str | None = None, secret_file: Path | None = None) -> None:
    """Hold the rendezvous until somebody ends this process."""
    secret, path = find_secret(secret_file, make=True)
    address = own_address() if listen is None else listen
    try:
        host = Host(address, port, secret)
    except OSError as error:
        raise Z2aError(
            f"{address}:{port} cannot be had ({error.strerror}): is another rendezvous running? Try --port or --listen"
        ) from None
    say(f"nodes meet at {host.place}; Ctrl-C ends it")
    where = "the variable Z2A_JOB_SECRET" if path is None else f"{path} (mode 0600)"
    say(f"the job secret is in {where}: every node needs it, in the same place, by --secret-file or Z2A_JOB_SECRET")
    host.serve()


class Rendezvous(RendezvousHandler):
    """A job's place among its nodes, for torch's elastic agent. ``close`` ends the job for all nodes.

    >>> rendezvous = Rendezvous(Place("login:29500"), Rules((2, 3, 4)), job="abc", procs=8)
    >>> rendezvous.next_rendezvous().rank
    0
    """

    def __init__(self, place: Place, rules: Rules, job: str, procs: int) -> None:
        """``job`` is the same on every node and differs from that of other jobs at the same place."""
        self.job, self.rules = job, rules
        self.address = self._own_address(place)
        self.secret, self.host = self._secret_and_host(place)
        self.place = place.endpoint or (self.host.place if self.host is not None else "")
        self.failed = False
        """Whether the ranks of the last round have failed: their peers wait for them in vain."""
        self.seat: Seat | None = None
        try:
            self.link = Link(self.host.place if self.host is not None else self.place, self.secret, place.patience)
            own = {"address": self.address, "pid": os.getpid(), "procs": procs}
            self.link.ask("enter", job=job, rules=rules_message(rules), node=own)
        except BaseException:
            self._end_host()
            raise
        self.link.keep_alive()

    def _own_address(self, place: Place) -> str:
        if place.advertise is not None:
            return place.advertise
        if place.endpoint is None:
            return LOOPBACK
        address = address_towards(place.endpoint)
        if self.rules.most > 1:
            must_reach_others(place.endpoint, address)
        return address

    def _secret_and_host(self, place: Place) -> tuple[str, Host | None]:
        """The rendezvous itself, where this node is the one to hold it."""
        if place.endpoint is None:  # nobody else needs to know
            secret = new_secret()
            return secret, _started(Host(LOOPBACK, 0, secret))
        here = is_ours(place.endpoint) or place.listen is not None
        secret, _ = find_secret(place.secret_file, make=here, patience=place.patience)
        if not here:
            return secret, None
        _, (address, port, *_) = resolved(place.endpoint)
        try:
            return secret, _started(Host(place.listen or address, port, secret))
        except OSError:
            return secret, None  # another process of this machine holds it

    def get_backend(self) -> str:
        return "z2a"

    def get_run_id(self) -> str:
        return self.job

    def next_rendezvous(self) -> RendezvousInfo:
        failed, self.failed = self.failed, False
        self.seat = Seat(**self._wait_for_seat(failed))
        store = RendezvousStoreInfo(self.seat.master, self.seat.port)
        return RendezvousInfo(LinkStore(self.link), self.seat.rank, self.seat.nodes, store)

    def _wait_for_seat(self, failed: bool) -> dict[str, Any]:
        pending = self.link.send("wait", port=_free_port(self.address), failed=failed)
        deadline, told = time.monotonic() + JOIN, False
        while not pending.arrived.wait(_LOOK):
            if self.link.status.running:
                deadline = time.monotonic() + JOIN
                if not told:
                    say(f"the job is running (nodes: {self.link.status.running}); this one waits to be taken in")
                    told = True
            elif time.monotonic() > deadline:
                raise RendezvousTimeoutError(f"fewer than {self.rules.counts[0]} nodes came in {JOIN:.0f} s")
        seat: dict[str, Any] = self.link.value(pending)
        return seat

    def num_nodes_waiting(self) -> int:
        """More than none if the ranks are to save and start again with other nodes."""
        self.link.must_be_there()
        status = self.link.status
        if status.closed == "failed":
            raise JobEndedError(done=False)
        return int(status.change and not status.lost and status.closed is None)

    def lost_for(self) -> float | None:
        """Seconds since a peer of this round was lost; None if none is."""
        since = self.link.lost_since
        return None if since is None else time.monotonic() - since

    def stand_without_us(self, step: int) -> tuple[int, bool]:
        """On how many nodes the job would run without this one, which fails at ``step`` again and again; and whether
        others fail there too."""
        answer = self.link.ask("fail", step=step)
        return int(answer["left"]), bool(answer["elsewhere"])

    def is_closed(self) -> bool:
        return self.link.status.closed is not None

    def set_closed(self) -> None:
        self.close("failed")

    def close(self, outcome: Outcome) -> None:
        """End the job for all nodes."""
        with suppress(RendezvousError):  # it went before us, and the job with it
            self.link.ask("close", outcome=outcome)

    def leave(self) -> None:
        """The ranks of this node have saved and ended; the others may continue."""
        with suppress(RendezvousError):
            self.link.ask("leave")

    def shutdown(self) -> bool:
        """Disconnect. What is not closed and was not left is lost to the others."""
        self.link.close()
        self._end_host()
        return True

    def _end_host(self) -> None:
        if self.host is not None:
            self.host.stop()


def _started(host: Host) -> Host:
    host.start()
    return host


def _free_port(address: str) -> int:
    """For the store of the ranks. Where the address is not this machine's own (NAT), of any interface."""
    for candidate in (address, ""):
        family = socket.AF_INET6 if ":" in candidate else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind((candidate, 0))
            port: int = probe.getsockname()[1]
            return port
    raise UsageError(f"no free port on this machine for {address}")
