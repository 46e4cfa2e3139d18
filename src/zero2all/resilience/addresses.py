"""Addresses of this machine and of the rendezvous."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from zero2all.errors import UsageError, Z2aError

PORT = 29500
LOOPBACK = "127.0.0.1"
_ELSEWHERE = ("192.0.2.1", 9)  # for documentation: nobody has it, and nothing is sent


def address_towards(endpoint: str) -> str:
    """The address from which this machine reaches another: its host name may mean something else elsewhere."""
    try:
        return _source_address(*resolved(endpoint))
    except OSError as error:
        raise Z2aError(f"no way from here to {endpoint} ({error}): check the name and the network") from error


def own_address() -> str:
    """By which others reach this machine: what its name means, or else the address of its default route."""
    found = []
    with suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    with suppress(OSError):
        found.append(_source_address(socket.AF_INET, _ELSEWHERE))
    usable = (address for address in found if not ip_address(address).is_loopback and is_ours(f"{address}:0"))
    return next(usable, LOOPBACK)


def is_ours(endpoint: str) -> bool:
    """Whether it is an address of this machine: only those can be bound."""
    try:
        family, (host, *_) = resolved(endpoint)
    except OSError as error:
        raise Z2aError(f"no way from here to {endpoint} ({error}): check the name and the network") from error
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
        return True


def resolved(endpoint: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--rendezvous is {endpoint}: write HOST:{PORT}")
    family, _, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    return family, where


def must_reach_others(endpoint: str, address: str) -> None:
    """Debian lets a machine's name mean 127.0.1.1 on the machine itself; others would look for it at home."""
    host = endpoint.rpartition(":")[0]
    if ip_address(address).is_loopback and host != "localhost" and not host.startswith(("127.", "[::1")):
        raise UsageError(
            f"{host} means {address} on this machine, where no other node can reach it: give its network address "
            f"instead, as --rendezvous 10.0.0.1:{PORT}, or fix /etc/hosts"
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


def _source_address(family: socket.AddressFamily, where: tuple[Any, ...]) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # sends nothing
        address: str = probe.getsockname()[0]
        return address
