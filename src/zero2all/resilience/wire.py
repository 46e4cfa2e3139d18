"""How agents talk to the rendezvous: signed frames of JSON, after both sides have proved that they know the secret.

Nothing is parsed before its HMAC is verified, and nothing is ever unpickled. The keys of a connection come from random
numbers of both sides and every frame is counted, so what was recorded on one connection is worth nothing on another.
The frames are signed, not encrypted: whoever listens can read addresses and ranks, and no secret.
"""

from __future__ import annotations

import hmac
import json
from typing import Any

MAGIC = b"z2a-rendezvous-1"
NONCE = 32
MAC = 32
LENGTH = 4
LARGEST = 4 << 20  # bytes in a frame
REFUSED, WELCOME = b"\0", b"\1"
LONGEST_NAME = 255

Message = dict[str, Any]


class TamperedError(Exception):
    """A frame that nobody with the secret has sent, or not here and now."""


def sign(key: bytes, *parts: bytes) -> bytes:
    """Over the lengths too: no two lists of parts have the same signature."""
    mac = hmac.new(key, digestmod="sha256")
    for part in parts:
        mac.update(len(part).to_bytes(8, "big") + part)
    return mac.digest()


def verify(key: bytes, signature: bytes, *parts: bytes) -> bool:
    return hmac.compare_digest(signature, sign(key, *parts))


def client_proof(secret: bytes, server_nonce: bytes, client_nonce: bytes, name: bytes) -> bytes:
    return sign(secret, b"client", server_nonce, client_nonce, name)


def server_proof(secret: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return sign(secret, b"server", server_nonce, client_nonce)


class Channel:
    """One connection's signatures and counters, the same on both sides but for the direction."""

    def __init__(self, secret: bytes, server_nonce: bytes, client_nonce: bytes, is_server: bool) -> None:
        self._key = sign(secret, b"session", server_nonce, client_nonce)
        self._out, self._in = (b"server", b"client") if is_server else (b"client", b"server")
        self._sent = self._received = 0

    def seal(self, message: Message) -> bytes:
        body = json.dumps(message).encode()
        signature = sign(self._key, self._out, self._sent.to_bytes(8, "big"), body)
        self._sent += 1
        return (MAC + len(body)).to_bytes(LENGTH, "big") + signature + body

    def open(self, frame: bytes) -> Message:
        """``frame`` is what follows the length."""
        signature, body = frame[:MAC], frame[MAC:]
        if not verify(self._key, signature, self._in, self._received.to_bytes(8, "big"), body):
            raise TamperedError("a frame without a valid signature")
        self._received += 1
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise TamperedError(f"a signed frame that is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise TamperedError("a signed frame that is not an object")
        return message


def frame_length(head: bytes) -> int:
    length = int.from_bytes(head, "big")
    if not MAC <= length <= LARGEST:
        raise TamperedError(f"a frame of {length} bytes")
    return length


def shown(name: bytes) -> str:
    """A name that a stranger gave, fit for a terminal."""
    text = name.decode("utf-8", errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text) or "?"
