"""Signed frames over TCP, after both sides have proved that they know a secret; and the addresses of this machine.

Nothing is parsed before its HMAC is verified, and nothing is ever unpickled. Session keys derive from nonces
of both sides and every frame has a sequence number, so frames cannot be replayed on this or another connection.
Frames are signed, not encrypted: an eavesdropper can read them, but learns no secret.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import socket
import struct
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

NONCE_BYTES = 32
MAC_BYTES = 32
LENGTH_BYTES = 4
MAX_FRAME_BYTES = 4 << 20  # bytes in a frame
ONE_SHOT_BYTES = 1 << 16  # a thousand small frames a second are signed in one call each
REFUSED, WELCOME = b"\0", b"\1"
_IPV6_SCOPES = ("00", "10")  # in /proc/net/if_inet6, global and loopback: those of a link work only with its name


class TamperedError(Exception):
    """A frame that is forged, replayed or of another connection."""


def sign(key: bytes, *parts: bytes | memoryview) -> bytes:
    """Over the lengths too: no two lists of parts have the same signature."""
    if sum(map(len, parts)) <= ONE_SHOT_BYTES:
        return hmac.digest(key, b"".join([len(part).to_bytes(8, "big") + bytes(part) for part in parts]), "sha256")
    mac = hmac.new(key, digestmod="sha256")
    for part in parts:
        mac.update(len(part).to_bytes(8, "big"))
        mac.update(part)
    return mac.digest()


def verify(key: bytes, signature: bytes, *parts: bytes | memoryview) -> bool:
    return hmac.compare_digest(signature, sign(key, *parts))


def client_proof(secret: bytes, server_nonce: bytes, client_nonce: bytes, name: bytes) -> bytes:
    return sign(secret, b"client", server_nonce, client_nonce, name)


def server_proof(secret: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return sign(secret, b"server", server_nonce, client_nonce)


class SignedSession:
    """One connection's signatures and counters, the same on both sides but for the direction."""

    def __init__(self, secret: bytes, server_nonce: bytes, client_nonce: bytes, is_server: bool) -> None:
        self._key = sign(secret, b"session", server_nonce, client_nonce)
        self._out, self._in = (b"server", b"client") if is_server else (b"client", b"server")
        self._sent = self._received = 0

    def seal(self, message: object) -> bytes:
        return self.seal_encoded(json.dumps(message).encode())

    def seal_encoded(self, body: bytes) -> bytes:
        """As ``seal``, for JSON that is encoded once and sent to many."""
        return self.frame_head(body) + body

    def frame_head(self, body: bytes | memoryview) -> bytes:
        """What precedes a body in its frame: large bodies are sent from where they are."""
        signature = sign(self._key, self._out, self._sent.to_bytes(8, "big"), body)
        self._sent += 1
        return (MAC_BYTES + len(body)).to_bytes(LENGTH_BYTES, "big") + signature

    def open(self, frame: bytes) -> object:
        """The parsed JSON object. ``frame`` is what follows the length."""
        body = frame[MAC_BYTES:]
        self.verify_frame(frame[:MAC_BYTES], body)
        try:
            message: object = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise TamperedError(f"a signed frame that is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise TamperedError("a signed frame that is not an object")
        return message

    def verify_frame(self, signature: bytes, body: bytes | memoryview) -> None:
        """Raise an error unless this is the next frame of the other side."""
        if not verify(self._key, signature, self._in, self._received.to_bytes(8, "big"), body):
            raise TamperedError("a frame without a valid signature")
        self._received += 1


def frame_length(head: bytes) -> int:
    length = int.from_bytes(head, "big")
    if not MAC_BYTES <= length <= MAX_FRAME_BYTES:
        raise TamperedError(f"a frame of {length} bytes")
    return length


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray(count)
    receive_into(connection, memoryview(received))
    return bytes(received)


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill ``target``."""
    at = 0
    while at < len(target):
        count = connection.recv_into(target[at:])
        if count == 0:
            raise ConnectionResetError("the other side has closed it")
        at += count


def source_address(family: socket.AddressFamily, destination: tuple[Any, ...]) -> str:
    """The address from which this machine reaches ``destination``."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(destination)  # sends nothing
        address: str = probe.getsockname()[0]
        return address


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
