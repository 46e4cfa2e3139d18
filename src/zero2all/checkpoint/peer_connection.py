"""The connection between two ranks over which states travel: signed messages and signed blocks of raw bytes."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from zero2all.network import (
    LENGTH_BYTES,
    MAC_BYTES,
    NONCE_BYTES,
    REFUSED,
    WELCOME,
    SignedSession,
    TamperedError,
    client_proof,
    frame_length,
    receive_exactly,
    receive_into,
    server_proof,
    sign,
    verify,
)
from zero2all.records import parse_record

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAGIC = b"z2a-replicas-001"
BLOCK_BYTES = 1 << 20  # under one signature
HANDSHAKE_TIMEOUT = 10.0  # seconds
STALL_TIMEOUT = 30.0  # seconds without a byte after which a peer is lost
LOW_PRIORITY = 0x20  # DSCP CS1, "lower effort": routers that look at it let gradients pass first
Message = TypeVar("Message")


class Address(NamedTuple):
    host: str
    port: int


class RateLimit:
    """A token bucket: ``take`` sleeps until that many bytes may be sent. None: no limit."""

    def __init__(
        self,
        bytes_per_second: float | None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._now, self._sleep = bytes_per_second, now, sleep
        self._free_at = now()

    def take(self, count: int) -> None:
        if self._rate is None:
            return
        now = self._now()
        # A pause earns no burst: the link is shared with gradients.
        begin = max(now, self._free_at)
        self._free_at = begin + count / self._rate
        if begin > now:
            self._sleep(begin - now)


class PeerConnection:
    """An authenticated connection; use it in one thread at a time.

    >>> with connect(address, secret) as peer:
    ...     peer.send(FetchRequest(rank=3, world_size=8, step=20, history="a1"))
    ...     reply = peer.receive(FetchReply)
    """

    def __init__(self, connection: socket.socket, session: SignedSession) -> None:
        self._socket, self._session = connection, session

    def __enter__(self) -> PeerConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def send(self, message: DataclassInstance) -> None:
        self._socket.sendall(self._session.seal(asdict(message)))

    def receive(self, record: type[Message]) -> Message:
        length = frame_length(receive_exactly(self._socket, LENGTH_BYTES))
        return parse_record(record, self._session.open(receive_exactly(self._socket, length)), "a message of a peer")

    def send_bytes(self, data: memoryview, before_block: Callable[[int], None] = lambda count: None) -> None:
        """``before_block`` is called with the bytes of each block: it may wait, or raise an error to give up."""
        for at in range(0, len(data), BLOCK_BYTES):
            block = data[at : at + BLOCK_BYTES]
            before_block(len(block))
            head = self._session.frame_head(block)
            sent = self._socket.sendmsg([head, block])
            if sent < len(head):
                self._socket.sendall(head[sent:])
            self._socket.sendall(block[max(0, sent - len(head)) :])

    def receive_bytes(self, target: memoryview, after_block: Callable[[], None] = lambda: None) -> None:
        """Fill ``target``; what it holds is authenticated only once this returns."""
        for at in range(0, len(target), BLOCK_BYTES):
            block = target[at : at + BLOCK_BYTES]
            head = receive_exactly(self._socket, LENGTH_BYTES + MAC_BYTES)
            if frame_length(head[:LENGTH_BYTES]) != MAC_BYTES + len(block):
                raise TamperedError("a block of another size than announced")
            receive_into(self._socket, block)
            self._session.verify_frame(head[LENGTH_BYTES:], block)
            after_block()


def connect(
    address: Address, secret: bytes, patience: float = HANDSHAKE_TIMEOUT, stall_timeout: float = STALL_TIMEOUT
) -> PeerConnection:
    """``patience`` is the seconds for each message of the handshake."""
    connection = socket.create_connection(address, timeout=patience)
    try:
        _configure(connection)
        greeting = receive_exactly(connection, len(MAGIC) + NONCE_BYTES)
        if not greeting.startswith(MAGIC):
            raise TamperedError(f"what answers at {address.host}:{address.port} is no rank of this version of zero2all")
        theirs, mine, key = greeting[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES), _connection_key(secret)
        connection.sendall(mine + client_proof(key, theirs, mine, b""))
        if receive_exactly(connection, 1) != WELCOME:
            raise TamperedError(f"{address.host}:{address.port} has another job secret")
        if not verify(key, receive_exactly(connection, MAC_BYTES), b"server", theirs, mine):
            raise TamperedError(f"what answers at {address.host}:{address.port} does not know the job secret")
        connection.settimeout(stall_timeout)
        return PeerConnection(connection, SignedSession(key, theirs, mine, is_server=False))
    except BaseException:
        connection.close()
        raise


def accept(connection: socket.socket, secret: bytes) -> PeerConnection:
    """Authenticate who has connected; raises an error if it does not know the secret."""
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT
    connection.settimeout(HANDSHAKE_TIMEOUT)
    _configure(connection)
    mine, key = secrets.token_bytes(NONCE_BYTES), _connection_key(secret)
    connection.sendall(MAGIC + mine)
    answer = bytearray()
    while len(answer) < NONCE_BYTES + MAC_BYTES:  # in time as a whole: a byte now and then is no progress
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(NONCE_BYTES + MAC_BYTES - len(answer))
        if not part:
            raise ConnectionResetError("closed during the handshake")
        answer += part
    theirs, proof = bytes(answer[:NONCE_BYTES]), bytes(answer[NONCE_BYTES:])
    if not verify(key, proof, b"client", mine, theirs, b""):
        connection.sendall(REFUSED)
        raise TamperedError("a wrong job secret")
    connection.sendall(WELCOME + server_proof(key, mine, theirs))
    connection.settimeout(STALL_TIMEOUT)
    return PeerConnection(connection, SignedSession(key, mine, theirs, is_server=True))


def _connection_key(secret: bytes) -> bytes:
    """Not the secret itself: a proof of the rendezvous must be worth nothing here."""
    return sign(secret, b"replicas")


def _configure(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with suppress(OSError):
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, LOW_PRIORITY)
