"""Where nodes meet: the options of a rendezvous, its secret, and its server if this node hosts it."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zero2all.base.console import say
from zero2all.base.network.addresses import (
    LOOPBACK,
    HostPort,
    NodeAddress,
    find_node_address,
    is_local_address,
    resolve_endpoint,
)
from zero2all.cluster.launch.job_secret import find_secret, new_secret
from zero2all.cluster.launch.overlay import WireGuardOverlay
from zero2all.cluster.launch.rendezvous_server import RendezvousServer
from zero2all.cluster.launch.restart_policy import ExcludedNode

_POLL_INTERVAL = 0.5


@dataclass(frozen=True)
class RendezvousConfig:
    """Where and how nodes meet; the options of the command line."""

    endpoint: str | None = None
    """HOST:PORT; None for a job on one node."""
    listen: str | None = None
    """ADDRESS or ADDRESS:PORT to bind if this node hosts it; the address of ``endpoint`` if not given."""
    advertise: str | None = None
    """HOST or HOST:PORT at which other nodes reach this one, and the store of the ranks if they are on this node; the
    address from which it reaches the rendezvous if not given."""
    secret_file: Path | None = None
    patience: float = 60.0
    """Seconds to wait for an answer."""
    readmit: bool = False
    """Whether this node comes back although it was excluded."""
    excluded: tuple[ExcludedNode, ...] = ()
    """The excluded nodes that this one knows from the rendezvous before it was lost."""
    listen_ranks: str | None = None
    """Address or interface of this node that its ranks use, and the port of their store."""
    check_network: bool = False
    """Whether the nodes try to reach each other before their ranks start."""
    overlay: WireGuardOverlay | None = None
    """The private network that the ranks use."""

    def node_address(self, *, several: bool) -> NodeAddress:
        """The address of this node, without the overlay. ``several``: it is one of several nodes."""
        return find_node_address(self.endpoint, self.advertise, self.listen_ranks, several=several)


class RendezvousHost:
    """Starts the server if this node hosts the rendezvous; ``stop`` ends it.

    >>> host = RendezvousHost(RendezvousConfig("login:29500"))
    >>> host.endpoint
    'login:29500'
    """

    def __init__(self, config: RendezvousConfig) -> None:
        self.server: RendezvousServer | None = None
        self.secret = self._start(config)
        own = "" if self.server is None else self.server.endpoint
        self.endpoint = config.endpoint or own
        self.own_endpoint = own or self.endpoint
        """The endpoint by which this node reaches the rendezvous: behind a port map, no packet comes back to its own
        outer address."""
        if self.server is None and config.listen is not None:
            self.own_endpoint = str(_bound_address(config.endpoint or "", config.listen))

    def _start(self, config: RendezvousConfig) -> str:
        """Returns the secret of the job."""
        if config.endpoint is None:  # no other node connects
            secret = new_secret()
            self._serve(HostPort(LOOPBACK, 0), secret)
            return secret
        here = is_local_address(config.endpoint) or config.listen is not None
        secret, _ = find_secret(config.secret_file, make=here, patience=config.patience)
        if here:
            bound = _bound_address(config.endpoint, config.listen)
            with suppress(OSError):  # another process of this machine hosts it
                self._serve(bound, secret)
        return secret

    def _serve(self, bound: HostPort, secret: str) -> None:
        server = RendezvousServer(bound.host, bound.port or 0, secret)
        server.start()
        self.server = server

    def report_hosting(self) -> None:
        assert self.server is not None
        bound = "" if self.server.endpoint == self.endpoint else f", which must lead to {self.server.endpoint} here"
        say(f"waiting for other nodes; they must reach TCP {self.endpoint}{bound}")

    def serve_others(self, seconds: float = math.inf) -> None:
        """Returns when no other node is connected any more, or after ``seconds``."""
        deadline = time.monotonic() + seconds
        while self.has_nodes() and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)

    def has_nodes(self) -> bool:
        return self.server is not None and self.server.has_nodes()

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()


def _bound_address(endpoint: str, listen: str | None) -> HostPort:
    """Where the node that hosts the rendezvous listens."""
    if listen is None:
        _, (address, port, *_) = resolve_endpoint(endpoint)
        return HostPort(str(address), port)
    bound = HostPort.parse(listen, "--rdzv-listen")
    _, (address, port, *_) = resolve_endpoint(f"{bound.host or '0.0.0.0'}:{bound.port or 0}")
    return HostPort(str(address), port or HostPort.parse(endpoint, "--rdzv-endpoint").port)
