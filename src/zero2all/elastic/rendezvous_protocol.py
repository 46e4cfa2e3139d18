"""Wire protocol of the rendezvous: the signed JSON frames of ``zero2all.network``."""

from __future__ import annotations

MAGIC = b"z2a-rendezvous-1"
MAX_NAME_BYTES = 255
HEARTBEAT_INTERVAL = 2.0  # seconds between two heartbeats of a node
CONNECT_TIMEOUT = 5.0  # seconds for one attempt to connect
RETRY_INTERVAL = 0.5  # seconds between two attempts to connect


def printable_name(name: bytes) -> str:
    """A name from an unauthenticated peer, safe to print."""
    text = name.decode("utf-8", errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text) or "?"
