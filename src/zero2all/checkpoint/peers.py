"""Connections between ranks over which states travel, for replicas on other nodes and for islands."""

from __future__ import annotations

from functools import partial

from zero2all.base.console import warn
from zero2all.base.errors import Z2aError
from zero2all.base.network.connection import HANDSHAKE_TIMEOUT, Address, Connection, Server, TamperedError, connect
from zero2all.checkpoint.background import BACKGROUND_NICENESS, run_in_background

SERVICE = "states"
STALL_TIMEOUT = 30.0  # seconds without a byte after which a peer is lost


def connect_peer(
    address: Address, secret: bytes, patience: float = HANDSHAKE_TIMEOUT, stall_timeout: float = STALL_TIMEOUT
) -> Connection:
    peer = connect(address, SERVICE, secret, patience, is_bulk=True)
    peer.socket.settimeout(stall_timeout)
    return peer


class PeerServer(Server):
    """A rank listens for other ranks, and serves each connection in a thread of its own."""

    is_bulk = True
    niceness = BACKGROUND_NICENESS
    """The priority of these threads relative to training."""

    def __init__(self, host: str, secret: bytes) -> None:
        super().__init__(host, 0, SERVICE, secret)
        self._open: set[Connection] = set()
        self.start()

    def answer(self, peer: Connection) -> None:
        """Serve one connection."""
        raise NotImplementedError

    def close(self) -> None:
        self.stop()
        for peer in list(self._open):
            peer.close()

    def report(self, text: str) -> None:
        warn(f"as a peer of this rank, {text}", every_rank=True)

    async def attend(self, client: Connection) -> None:
        client.socket.settimeout(STALL_TIMEOUT)
        run_in_background(partial(self._answer, client), self.niceness)

    def _answer(self, peer: Connection) -> None:
        with peer:
            self._open.add(peer)
            try:
                self.answer(peer)
            except (TamperedError, Z2aError) as error:
                self.warn_once(peer.host, f"node {peer.name} ({peer.host}) sent {error}: disconnected")
            except OSError:
                pass  # disconnected, too slow, or this rank is ending
            finally:
                self._open.discard(peer)
