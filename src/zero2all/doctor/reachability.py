"""Whether one node reaches another at an address and a port, and what to change if it does not.

A node listens and greets whoever connects; a probe connects and verifies the greeting. Without it a probe would take
any machine for the right one: containers on different hosts often have the same address.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zero2all.network import MAC_BYTES, receive_exactly, sign

CONNECT_TIMEOUT = 4.0  # seconds: the kernel repeats a lost packet after one and after three
MAX_PROBES = 256  # connections that a listener serves in its life, from anybody
MAX_RECEIVED = 1 << 28  # bytes from one of them
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
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class ProbeResult:
    problem: str | None = None
    """Why the other node was not reached, if so."""
    bytes_per_second: float | None = None
    """If data was sent."""


@dataclass(frozen=True)
class Unreachable:
    """One direction between two nodes that does not work."""

    source: str
    """Name of the node that connects,"""
    source_address: str
    """and the address from which it does."""
    node: str
    """That it cannot reach,"""
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


def greeting(secret: str, name: str) -> bytes:
    """What the listener ``name`` of a job answers."""
    return sign(secret.encode(), b"reachability", name.encode())


class ProbeListener:
    """
    >>> with ProbeListener("127.0.0.1", 0, greeting(secret, "3/1/data")) as listener:
    ...     probe("127.0.0.1", listener.port, greeting(secret, "3/1/data"))
    ProbeResult(problem=None, bytes_per_second=None)
    """

    def __init__(self, address: str, port: int, expected: bytes) -> None:
        self._greeting = expected
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((address, port))
            self._socket.listen(MAX_PROBES)
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="z2a-probe-listener", daemon=True)
        self._thread.start()

    def __enter__(self) -> ProbeListener:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(5)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            for _ in range(MAX_PROBES):
                found, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(found,), daemon=True).start()

    def _answer(self, found: socket.socket) -> None:
        with found, suppress(OSError):
            found.settimeout(2 * CONNECT_TIMEOUT)
            found.sendall(self._greeting)
            received, buffer = 0, bytearray(len(_CHUNK))
            while received < MAX_RECEIVED and (count := found.recv_into(buffer)):
                received += count
            found.sendall(received.to_bytes(_COUNT_BYTES, "big"))


def probe(target: Target, expected: bytes, timeout: float = CONNECT_TIMEOUT, send_for: float = 0.0) -> ProbeResult:
    """Connect, verify the greeting and, for ``send_for`` seconds, send data."""
    connected = False
    try:
        with socket.create_connection((target.address, target.port), timeout=timeout) as found:
            connected = True
            if receive_exactly(found, MAC_BYTES) != expected:
                return ProbeResult(_SOMETHING_ELSE)
            return ProbeResult(bytes_per_second=_send(found, send_for) if send_for else None)
    except OSError as error:
        return ProbeResult(_describe(error, connected, send_for > 0))


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


def _describe(error: OSError, connected: bool, sending: bool) -> str:
    match error:
        case TimeoutError() if connected and sending:
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
