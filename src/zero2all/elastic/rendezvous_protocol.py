"""Wire protocol of the rendezvous: signed JSON frames, after both sides have proved that they know the secret.

Nothing is parsed before its HMAC is verified, and nothing is ever unpickled. Session keys derive from nonces
of both sides and every frame has a sequence number, so frames cannot be replayed on this or another connection.
Frames are signed, not encrypted: an eavesdropper can read addresses and ranks, but no secret.
"""

from __future__ import annotations

import hmac
import json

MAGIC = b"z2a-rendezvous-1"
NONCE_BYTES = 32
MAC_BYTES = 32
LENGTH_BYTES = 4
MAX_FRAME_BYTES = 4 << 20  # bytes in a frame
REFUSED, WELCOME = b"\0", b"\1"
MAX_NAME_BYTES = 255
HEARTBEAT_INTERVAL = 2.0  # seconds between two heartbeats of a node
RETRY_INTERVAL = 0.5  # seconds between two attempts to connect


class TamperedError(Exception):
    """A frame that is forged, replayed or of another connection."""


def sign(key: bytes, *parts: bytes) -> bytes:
    """Over the lengths too: no two lists of parts have the same signature."""
    return hmac.digest(key, b"".join([len(part).to_bytes(8, "big") + part for part in parts]), "sha256")


def verify(key: bytes, signature: bytes, *parts: bytes) -> bool:
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
        signature = sign(self._key, self._out, self._sent.to_bytes(8, "big"), body)
        self._sent += 1
        return (MAC_BYTES + len(body)).to_bytes(LENGTH_BYTES, "big") + signature + body

    def open(self, frame: bytes) -> object:
        """The parsed JSON object. ``frame`` is what follows the length."""
        signature, body = frame[:MAC_BYTES], frame[MAC_BYTES:]
        if not verify(self._key, signature, self._in, self._received.to_bytes(8, "big"), body):
            raise TamperedError("a frame without a valid signature")
        self._received += 1
        try:
            message: object = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise TamperedError(f"a signed frame that is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise TamperedError("a signed frame that is not an object")
        return message


def frame_length(head: bytes) -> int:
    length = int.from_bytes(head, "big")
    if not MAC_BYTES <= length <= MAX_FRAME_BYTES:
        raise TamperedError(f"a frame of {length} bytes")
    return length


def printable_name(name: bytes) -> str:
    """A name from an unauthenticated peer, safe to print."""
    text = name.decode("utf-8", errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text) or "?"
