"""Addresses of this machine and of the rendezvous."""

from __future__ import annotations

import fcntl
import socket
import struct
import time
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from zero2all.console import say
from zero2all.errors import UsageError, Z2aError
from zero2all.network import source_address

DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"
_NAME_POLL_INTERVAL = 0.5  # seconds
_UNROUTABLE = ("192.0.2.1", 9)  # TEST-NET-1: not assigned, and nothing is sent


def wait_for_name(endpoint: str, patience: float) -> None:
    """Until the host name of ``endpoint`` resolves: that of a pod exists only once the pod has an address."""
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
    """Where others reach this machine: the address of its host name, else that of the default route."""
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


def interface_for_address(address: str) -> str | None:
    """The network interface with this IPv4 address, for gloo, which otherwise resolves the host name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            except OSError:
                continue  # no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
