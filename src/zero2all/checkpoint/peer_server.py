"""A rank listens for other ranks that know the secret. What they may ask for is up to a subclass."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from functools import partial

from zero2all.checkpoint.flash import BACKGROUND_NICENESS, run_in_background
from zero2all.checkpoint.peer_connection import Address, PeerConnection, accept
from zero2all.console import warn
from zero2all.errors import Z2aError
from zero2all.network import TamperedError

MAX_UNAUTHENTICATED = 256  # connections at a time
BACKLOG = 1024


class PeerServer:
    """Serves each connection in a thread of its own."""

    niceness = BACKGROUND_NICENESS
    """Of these threads, relative to training."""

    def __init__(self, host: str, secret: bytes) -> None:
        """Binds only that address, at a free port."""
        self._secret = secret
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self.address = Address(host, self._socket.getsockname()[1])
        self._unauthenticated = threading.BoundedSemaphore(MAX_UNAUTHENTICATED)
        self._open: set[PeerConnection] = set()
        self._closed, self._warned = False, set[str]()
        run_in_background(self._listen, self.niceness)

    def answer(self, peer: PeerConnection) -> None:
        """Called with each connection once it is authenticated."""
        raise NotImplementedError

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes up the thread that accepts
        self._socket.close()
        for peer in list(self._open):
            peer.close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                connection, (host, *_) = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                continue  # that client is gone, or there are too many open files for the moment
            if not self._unauthenticated.acquire(blocking=False):
                connection.close()
                continue
            run_in_background(partial(self._serve, connection, host), self.niceness)

    def _serve(self, connection: socket.socket, host: str) -> None:
        with connection:
            try:
                try:
                    peer = accept(connection, self._secret)
                finally:
                    self._unauthenticated.release()
                with peer:
                    self._open.add(peer)
                    try:
                        self.answer(peer)
                    finally:
                        self._open.discard(peer)
            except (TamperedError, Z2aError) as error:
                if host not in self._warned:
                    self._warned.add(host)
                    warn(f"{host} is not served as a peer of this rank: {error}", every_rank=True)
            except OSError:
                pass  # disconnected, too slow, or this rank is ending
