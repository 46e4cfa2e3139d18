"""Where the nodes of a job meet: a store that one of them holds, or that runs by itself (``z2a rendezvous``).

With a store of its own the job survives the loss of any node. Otherwise the node that holds it must stay.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import threading
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from zero2all.console import say
from zero2all.errors import UsageError, Z2aError

PORT = 29500
JOIN = 600  # seconds to wait for the least number of nodes
LAST_CALL = 3  # and then for more of them
KEEP_ALIVE = 2  # a node that is silent for three times as long is gone


def serve(port: int = PORT) -> None:
    """Hold the store until somebody ends this process."""
    try:
        store = TCPStore("localhost", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    except RuntimeError as error:
        raise Z2aError(f"port {port} cannot be had ({error}): is another rendezvous running? Try --port") from error
    say(f"nodes meet at {socket.gethostname()}:{store.port}; Ctrl-C ends it")
    threading.Event().wait()


@dataclass
class Meeting:
    """A job's place among others in a store. ``close`` ends the job for all nodes."""

    handler: RendezvousHandler
    address: str | None
    """By which the other nodes reach this one."""
    place: str
    """HOST:PORT of the store."""
    _store: TCPStore
    _counter: str
    _generation: int

    @classmethod
    def arrange(cls, endpoint: str | None, least: int, most: int, job: str, patience: float) -> Meeting:
        """``job`` is the same on every node and differs from that of other jobs in the same store."""
        address = None
        if endpoint is not None:
            address = address_towards(endpoint)
            if most > 1:
                _must_reach_others(endpoint, address)

        def parameters(run_id: str, is_host: bool = False) -> RendezvousParameters:
            return RendezvousParameters(
                "c10d", endpoint or "localhost:0", run_id, least, most, local_addr=address, join_timeout=JOIN,
                last_call_timeout=LAST_CALL, keep_alive_interval=KEEP_ALIVE, read_timeout=int(patience),
                is_host=is_host,
            )  # fmt: skip

        # torch would look for the address among those of this machine's name, which is often 127.0.1.1 alone.
        is_here = endpoint is None or is_ours(endpoint)
        try:
            _, store = create_backend(parameters(job, is_host=is_here))
        except RendezvousConnectionError:
            if not is_here:
                raise
            _, store = create_backend(parameters(job))  # another process of this machine holds it
        assert isinstance(store, TCPStore)
        # torch never opens again what was closed, so each start of a job that has ended is a meeting of its own.
        counter = f"z2a/{job}"
        generation = store.add(counter, 0)
        run_id = f"{job}-{generation}"
        handler = create_handler(store, C10dRendezvousBackend(store, run_id), parameters(run_id))
        place = f"{endpoint.rpartition(':')[0] if endpoint else 'localhost'}:{store.port}"
        return cls(handler, address, place, store, counter, generation)

    def close(self) -> None:
        try:
            self._store.compare_set(self._counter, str(self._generation), str(self._generation + 1))
            self.handler.shutdown()
        except RuntimeError:
            pass  # the store went before us, and the meeting with it


def address_towards(endpoint: str) -> str:
    """The address from which this machine reaches another: its host name may mean something else elsewhere."""
    try:
        family, where = _resolved(endpoint)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise Z2aError(f"no way from here to {endpoint} ({error}): check the name and the network") from error


def is_ours(endpoint: str) -> bool:
    """Whether it is an address of this machine: only those can be taken."""
    family, (host, *_) = _resolved(endpoint)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
        return True


def _resolved(endpoint: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"--rendezvous is {endpoint}: write HOST:{PORT}")
    family, _, _, _, where = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    return family, where


def _must_reach_others(endpoint: str, address: str) -> None:
    """Debian lets a machine's name mean 127.0.1.1 on the machine itself; others would be told to find it there."""
    host = endpoint.rpartition(":")[0]
    if ip_address(address).is_loopback and host != "localhost" and not host.startswith(("127.", "[::1")):
        raise UsageError(
            f"{host} means {address} on this machine, where no other node can reach it: give its network address "
            f"instead, as --rendezvous 10.0.0.1:{PORT}, or mend /etc/hosts"
        )


def interface_of(address: str) -> str | None:
    """The network interface with this IPv4 address, for gloo, which otherwise goes by the host name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
