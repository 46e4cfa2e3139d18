"""The addresses and network interfaces of this machine."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

_IPV6_SCOPES = ("00", "10")  # in /proc/net/if_inet6, global and loopback: those of a link work only with its name


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
    """By a system call: sysfs may be that of another network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8921, struct.pack("256s", name.encode()))  # SIOCGIFMTU
        except OSError:
            return None
        return int(struct.unpack_from("i", answer, 16)[0])
