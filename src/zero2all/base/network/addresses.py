"""The addresses and network interfaces of this machine, and where it reaches a rendezvous."""

from __future__ import annotations

import fcntl
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

from zero2all.base.console import say
from zero2all.base.errors import UsageError, Z2aError

_IPV6_SCOPES = ("00", "10")  # in /proc/net/if_inet6, global and loopback: link-local ones need an interface


def source_address(family: socket.AddressFamily, destination: tuple[Any, ...]) -> str:
    """The address from which this machine reaches ``destination``."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(destination)  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def source_address_towards(host: str, port: int = 9) -> str:
    """The same for a name or an address."""
    family, _, _, _, destination = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    return source_address(family, destination)


def interface_for_address(address: str) -> str | None:
    """The network interface with this address, for gloo, which otherwise resolves the host name."""
    return next((name for name, own in interface_addresses().items() if own == address), None)


def interface_addresses() -> dict[str, str]:
    """The address of each interface as gloo takes it: the first of IPv4, else the first of IPv6."""
    found: dict[str, str] = {}
    with suppress(OSError):  # without IPv6 there is no such file
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope in _IPV6_SCOPES:
                found.setdefault(name, str(ip_address(bytes.fromhex(digits))))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            except OSError:
                continue  # no address
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_mtu(name: str) -> int | None:
    """Read the MTU by a system call: sysfs may show another network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8921, struct.pack("256s", name.encode()))  # SIOCGIFMTU
        except OSError:
            return None
        return int(struct.unpack_from("i", answer, 16)[0])


OverlayKind = Literal["none", "wireguard"]
DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"
_NAME_POLL_INTERVAL = 0.5  # seconds
_UNROUTABLE = ("192.0.2.1", 9)  # TEST-NET-1: not assigned, and nothing is sent


@dataclass(frozen=True)
class HostPort:
    """An address of the command line. ``port`` is None, or ``host`` empty, if it was left out."""

    host: str
    port: int | None

    @classmethod
    def parse(cls, text: str, option: str) -> HostPort:
        """
        >>> HostPort.parse("[fd00::1]:29501", "--advertise")
        HostPort(host='fd00::1', port=29501)
        """
        with suppress(ValueError):
            return cls(str(ip_address(text.strip("[]"))), None)
        host, colon, port = ("", ":", text) if text.isdigit() else text.rpartition(":")
        if not colon:
            return cls(text, None)
        if not port.isdigit() or not 0 < int(port) <= 65535 or (":" in host and not host.startswith("[")):
            raise UsageError(f"{option} is {text}: write HOST or HOST:PORT, and an IPv6 address as [fd00::1]:29501")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"


@dataclass(frozen=True)
class NodeAddress:
    """Where a node is. Behind a port map the two sides differ."""

    local: str
    """The address of the interface that its ranks use."""
    advertised: str
    """The address at which the other nodes reach it."""
    local_port: int | None = None
    """The port to listen on; None for any free one."""
    advertised_port: int | None = None
    """The port at which others reach it; None for the same."""

    @property
    def is_mapped(self) -> bool:
        return self.local != self.advertised


def find_node_address(endpoint: str | None, advertise: str | None, listen: str | None, *, several: bool) -> NodeAddress:
    """The address of this node, by the options of the command line. ``several``: it is one of several nodes."""
    shown = HostPort("", None) if advertise is None else HostPort.parse(advertise, "--advertise")
    bound = HostPort("", None) if listen is None else HostPort.parse(listen, "--listen")
    local = _local_address(endpoint, shown.host, bound.host, several=several)
    return NodeAddress(local, shown.host or local, bound.port or shown.port, shown.port or bound.port)


def _local_address(endpoint: str | None, advertised: str, listen: str, *, several: bool) -> str:
    if listen:
        return _address_of(listen)
    with suppress(Z2aError):
        if advertised and is_local_address(f"{advertised}:0"):
            return str(resolve_endpoint(f"{advertised}:0")[1][0])
    if endpoint is None:
        return LOOPBACK
    address = local_address_for(endpoint)
    if several and not advertised:
        refuse_loopback(endpoint, address)
    return address


def _address_of(listen: str) -> str:
    """``listen`` is an address, a name or an interface of this machine."""
    interfaces = interface_addresses()
    if listen in interfaces:
        return interfaces[listen]
    with suppress(Z2aError):
        if is_local_address(f"{listen}:0"):
            return str(resolve_endpoint(f"{listen}:0")[1][0])
    there = ", ".join(f"{name} {address}" for name, address in interfaces.items())
    raise UsageError(f"--listen is {listen}, which is no address or interface of this machine (it has {there})")


def wait_for_name(endpoint: str, patience: float) -> None:
    """Wait until the host name of ``endpoint`` resolves: a pod's name exists only once the pod has an address."""
    deadline, logged = time.monotonic() + patience, False
    while True:
        try:
            resolve_endpoint(endpoint)
            return
        except socket.gaierror as error:
            if time.monotonic() >= deadline:
                raise Z2aError(f"no route to {endpoint} ({error}): check the name and the network") from error
        if not logged:
            say(f"waiting up to {patience:.0f} s for the name of {endpoint} to resolve")
            logged = True
        time.sleep(_NAME_POLL_INTERVAL)


def local_address_for(endpoint: str) -> str:
    """The source address towards ``endpoint``: the host name may resolve differently on other machines."""
    try:
        return source_address(*resolve_endpoint(endpoint))
    except OSError as error:
        raise Z2aError(f"no route to {endpoint} ({error}): check the name and the network") from error


def default_address() -> str:
    """Where others reach this machine: the address of its host name, else the source address of the default route."""
    candidates = []
    with suppress(OSError):
        candidates.append(socket.gethostbyname(socket.gethostname()))
    with suppress(OSError):
        candidates.append(source_address(socket.AF_INET, _UNROUTABLE))
    usable = (
        address for address in candidates if not ip_address(address).is_loopback and is_local_address(f"{address}:0")
    )
    return next(usable, LOOPBACK)


def is_local_address(endpoint: str) -> bool:
    """Whether this machine has the address: only local addresses can be bound."""
    try:
        family, (host, *_) = resolve_endpoint(endpoint)
    except OSError as error:
        raise Z2aError(f"no route to {endpoint} ({error}): check the name and the network") from error
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
        return True


def resolve_endpoint(endpoint: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--rdzv-endpoint is {endpoint}: write HOST:{DEFAULT_PORT}")
    family, _, _, _, destination = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    return family, destination


def refuse_loopback(endpoint: str, address: str) -> None:
    """Debian resolves a machine's own name to 127.0.1.1; other nodes would connect to themselves."""
    host = endpoint.rpartition(":")[0]
    if ip_address(address).is_loopback and host != "localhost" and not host.startswith(("127.", "[::1")):
        raise UsageError(
            f"{host} resolves to {address} on this machine, where no other node can reach it: give its network "
            f"address instead, as --rdzv-endpoint 10.0.0.1:{DEFAULT_PORT}, or fix /etc/hosts"
        )
