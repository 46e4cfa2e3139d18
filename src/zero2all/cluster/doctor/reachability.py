"""Whether one node reaches another at an address and a port, and what to change if it does not.

A node listens, and a probe connects; both prove that they know the secret and mean the same listener. Else a probe
would take any machine for the right one: containers on different hosts often have the same address.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zero2all.base.network.addresses import source_address_towards
from zero2all.base.network.connection import Address, Connection, Server, TamperedError, connect, receive_exactly

CONNECT_TIMEOUT = 4.0  # seconds: the kernel repeats a lost packet after one and after three
MAX_RECEIVED = 1 << 28  # bytes from one probe
_COUNT_BYTES = 8
_FIRST_CHUNK, _CHUNK = 1 << 14, bytes(1 << 18)  # larger than any packet
_QUICK = 0.01  # seconds for a chunk, below which the next one is twice as large
_MAX_UNSENT = 1 << 15  # bytes in the kernel's buffer: on a slow link it would take longer to empty than anybody waits
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_EPHEMERAL = "32768-60999"

Purpose = Literal["store", "data"]
PURPOSES: dict[Purpose, str] = {"store": "the store of the ranks", "data": "gloo and NCCL"}


@dataclass(frozen=True)
class Target:
    """Where a node listens, as another one sees it."""

    address: str
    port: int
    purpose: Purpose
    ports: str = ""
    """What must be open on the node itself for this purpose, if not just ``port``."""

    def __str__(self) -> str:
        return str(Address(self.address, self.port))


@dataclass(frozen=True)
class ReachabilityResult:
    problem: str | None = None
    """Why the other node was not reached, if so."""
    bytes_per_second: float | None = None
    """The rate at which data was sent, if any was."""


def unreachable(
    node: str, target: Target, problem: str, *, is_mapped: bool, own_address: str, overlay_endpoint: str | None = None
) -> Unreachable:
    """A direction that begins on this machine; ``own_address`` is what is shown if there is no route."""
    with suppress(OSError):
        own_address = source_address_towards(target.address, target.port)
    return Unreachable(socket.gethostname(), own_address, node, target, problem, is_mapped, overlay_endpoint)


@dataclass(frozen=True)
class Unreachable:
    """One direction between two nodes that does not work."""

    source: str
    """The name of the node that connects."""
    source_address: str
    """The address from which it connects."""
    node: str
    """The node that it cannot reach."""
    target: Target
    problem: str
    is_mapped: bool = False
    """Whether the node is reached at an address that is not its own."""
    overlay_endpoint: str | None = None
    """HOST:PORT of its end of the overlay, if there is one."""

    def __str__(self) -> str:
        what = PURPOSES[self.target.purpose]
        return (
            f"node {self.source} ({self.source_address}) cannot reach node {self.node} at {self.target} (TCP, {what}): "
            f"{self.problem}; {self.fix}"
        )

    @property
    def fix(self) -> str:
        if self.problem == LARGE_PACKETS_VANISH:
            return (
                f"allow ICMP 'fragmentation needed' (IPv6: 'packet too big') on the way from node {self.source} to "
                f"node {self.node}, or lower the MTU of both: ip link set dev INTERFACE mtu 1400"
            )
        if self.overlay_endpoint is not None:
            return (
                f"both nodes send to each other's UDP port: map or open UDP {self.overlay_endpoint} to node {self.node}"
                f" (--advertise HOST:PORT there), and allow it from node {self.source}"
            )
        rule = f"on node {self.node} allow TCP {self.target.ports or self.target.port} from {self.source_address}"
        if self.target.purpose == "data":
            return f"{rule}; if NAT is between them, no port map helps: use --overlay wireguard"
        if self.is_mapped:
            return f"{rule}, and check that the port map leads {self.target} to it"
        return rule


class ProbeListener(Server):
    """
    >>> with ProbeListener("127.0.0.1", 0, "3/1/data", secret) as listener:
    ...     probe(Target("127.0.0.1", listener.address.port, "data"), "3/1/data", secret)
    ReachabilityResult(problem=None, bytes_per_second=None)
    """

    def __init__(self, address: str, port: int, name: str, secret: str) -> None:
        super().__init__(address, port, _service(name), secret.encode())
        self.start()

    def __enter__(self) -> ProbeListener:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    async def attend(self, client: Connection) -> None:
        loop, received, buffer = asyncio.get_running_loop(), 0, bytearray(len(_CHUNK))
        with client, suppress(OSError):
            async with asyncio.timeout(2 * CONNECT_TIMEOUT) as limit:
                while received < MAX_RECEIVED and (count := await loop.sock_recv_into(client.socket, buffer)):
                    received += count
                    limit.reschedule(loop.time() + 2 * CONNECT_TIMEOUT)
                await loop.sock_sendall(client.socket, received.to_bytes(_COUNT_BYTES, "big"))


def _service(name: str) -> str:
    """The service of one node's listener: a client that reaches another listener is rejected."""
    return f"reachability/{name}"


def probe(
    target: Target, name: str, secret: str, timeout: float = CONNECT_TIMEOUT, send_for: float = 0.0
) -> ReachabilityResult:
    """Connect to the listener ``name`` of a job and, for ``send_for`` seconds, send data."""
    is_sending = False
    try:
        address = Address(target.address, target.port)
        with connect(address, _service(name), secret.encode(), timeout) as connection:
            is_sending = send_for > 0
            return ReachabilityResult(bytes_per_second=_send(connection.socket, send_for) if is_sending else None)
    except TamperedError:
        return ReachabilityResult(_SOMETHING_ELSE)
    except OSError as error:
        return ReachabilityResult(_describe(error, is_sending=is_sending))


LARGE_PACKETS_VANISH = (
    "it connects, but large packets vanish: a link on the way has a smaller MTU and the ICMP messages that say so are "
    "dropped"
)
_SOMETHING_ELSE = (
    "something else answers there: another machine has the same address, as containers on different hosts often have, "
    "or the port map leads elsewhere"
)


def _send(found: socket.socket, seconds: float) -> float:
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT)
    begin, sent, size = time.monotonic(), 0, _FIRST_CHUNK
    while (now := time.monotonic()) - begin < seconds and sent + size <= MAX_RECEIVED:
        found.sendall(memoryview(_CHUNK)[:size])
        sent += size
        if time.monotonic() - now < _QUICK:
            size = min(2 * size, len(_CHUNK))
    found.shutdown(socket.SHUT_WR)
    if int.from_bytes(receive_exactly(found, _COUNT_BYTES), "big") != sent:
        raise ConnectionError("part of the data is lost")
    return sent / (time.monotonic() - begin)


def _describe(error: OSError, *, is_sending: bool) -> str:
    match error:
        case TimeoutError() if is_sending:
            return LARGE_PACKETS_VANISH
        case TimeoutError():
            return "no answer: a firewall drops it, or no machine has this address"
        case ConnectionRefusedError():
            return "refused: nothing listens there, or a firewall rejects it"
        case ConnectionResetError():
            return _SOMETHING_ELSE
        case OSError(errno=errno.EHOSTUNREACH | errno.ENETUNREACH):
            return "no route, or a firewall rejects it"
        case socket.gaierror():
            return f"the name does not resolve there ({error.strerror})"
        case _:
            return error.strerror or str(error)


def ephemeral_ports() -> str:
    """The ports that gloo and NCCL take, as ``FIRST-LAST``: they bind any free one."""
    try:
        return "-".join(_EPHEMERAL.read_text().split())
    except OSError:
        return _DEFAULT_EPHEMERAL
