"""Connections over TCP between processes that know a secret, and the server that accepts them.

Both sides prove that they know it before anything else is read. Nothing is parsed before its HMAC is verified, and
nothing is ever unpickled. Session keys derive from nonces of both sides and every frame has a sequence number, so
frames cannot be replayed on this or another connection. Frames are signed, not encrypted: an eavesdropper can read
them, but learns no secret.

The key depends on the service too: what is proved to one is worth nothing at another.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from zero2all.base.records import parse_record

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import DataclassInstance

MAGIC = b"z2a-connection-1"
NONCE_BYTES = MAC_BYTES = 32
NAME_BYTES = 64  # of a host name, padded with zeros
LENGTH_BYTES = 4
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
HELLO_BYTES = NONCE_BYTES + NAME_BYTES + MAC_BYTES
WELCOME_BYTES = 1 + MAC_BYTES
MAX_FRAME_BYTES = 4 << 20
BLOCK_BYTES = 1 << 20  # of raw data under one signature
ONE_SHOT_BYTES = 1 << 16  # a thousand small frames a second are signed in one call each
REFUSED, WELCOME = b"\0", b"\1"
HANDSHAKE_TIMEOUT = 10.0  # seconds for a client to authenticate
MAX_UNAUTHENTICATED = 1024  # connections at a time
BACKLOG = 4096
ACCEPT_PAUSE = 0.1  # seconds until the next attempt while there are too many open files
WARNING_INTERVAL = 60.0  # seconds between two warnings about the same address
LOW_PRIORITY = 0x20  # DSCP CS1, "lower effort": routers that look at it let gradients pass first
Message = TypeVar("Message")


class TamperedError(Exception):
    """A frame that is forged, replayed or of another connection, or a side that does not know the secret."""


class UnknownServiceError(TamperedError):
    """What answers is no server of this version of zero2all."""


class WrongKeyError(TamperedError):
    """The server refuses this secret."""


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def sign(key: bytes, *parts: bytes | memoryview) -> bytes:
    """Sign the parts and their lengths: no two lists of parts have the same signature."""
    if sum(map(len, parts)) <= ONE_SHOT_BYTES:
        return hmac.digest(key, b"".join([len(part).to_bytes(8, "big") + bytes(part) for part in parts]), "sha256")
    mac = hmac.new(key, digestmod="sha256")
    for part in parts:
        mac.update(len(part).to_bytes(8, "big"))
        mac.update(part)
    return mac.digest()


def verify(key: bytes, signature: bytes, *parts: bytes | memoryview) -> bool:
    return hmac.compare_digest(signature, sign(key, *parts))


class SignedSession:
    """One connection's signatures and counters, the same on both sides but for the direction."""

    def __init__(self, key: bytes, server_nonce: bytes, client_nonce: bytes, *, is_server: bool) -> None:
        self._key = sign(key, b"session", server_nonce, client_nonce)
        self._out, self._in = (b"server", b"client") if is_server else (b"client", b"server")
        self._sent = self._received = 0

    def seal(self, message: object) -> bytes:
        return self.seal_encoded(json.dumps(message).encode())

    def seal_encoded(self, body: bytes) -> bytes:
        """Seal JSON that is encoded once and sent to many."""
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


class ClientHandshake:
    """What a client answers to the greeting of a server, and how it verifies the welcome; without a socket."""

    def __init__(self, service: str, secret: bytes, name: str) -> None:
        self._key = sign(secret, service.encode())
        self._name = name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
        self._nonces = (b"", secrets.token_bytes(NONCE_BYTES))

    def hello(self, greeting: bytes) -> bytes:
        if not greeting.startswith(MAGIC):
            raise UnknownServiceError("is no server of this version of zero2all")
        self._nonces = (greeting[len(MAGIC) :], self._nonces[1])
        return self._nonces[1] + self._name + sign(self._key, b"client", *self._nonces, self._name)

    def session(self, welcome: bytes) -> SignedSession:
        if welcome[:1] != WELCOME:
            raise WrongKeyError("has another job secret")
        if not verify(self._key, welcome[1:], b"server", *self._nonces):
            raise TamperedError("does not know the job secret")
        return SignedSession(self._key, *self._nonces, is_server=False)


class Connection:
    """An authenticated connection; in each direction one thread at a time may use it.

    >>> with connect(address, "replicas", secret) as peer:
    ...     peer.send(FetchRequest(rank=3, world_size=8, step=20, history="a1"))
    ...     reply = peer.receive(FetchReply)
    """

    def __init__(self, connection: socket.socket, session: SignedSession, name: str = "", host: str = "") -> None:
        """On the server's side ``name`` is the client's host name, as the client says, and ``host`` its address."""
        self.socket, self.session, self.name, self.host = connection, session, name, host

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that receives
        self.socket.close()

    def send(self, message: DataclassInstance | dict[str, Any]) -> None:
        self.socket.sendall(self.session.seal(message if isinstance(message, dict) else asdict(message)))

    def receive(self, record: type[Message]) -> Message:
        length = frame_length(receive_exactly(self.socket, LENGTH_BYTES))
        return parse_record(record, self.session.open(receive_exactly(self.socket, length)), "a message")

    def send_bytes(self, data: memoryview, before_block: Callable[[int], None] = lambda count: None) -> None:
        """``before_block`` is called with the bytes of each block: it may wait, or raise an error to give up."""
        for at in range(0, len(data), BLOCK_BYTES):
            block = data[at : at + BLOCK_BYTES]
            before_block(len(block))
            head = self.session.frame_head(block)
            sent = self.socket.sendmsg([head, block])
            if sent < len(head):
                self.socket.sendall(head[sent:])
            self.socket.sendall(block[max(0, sent - len(head)) :])

    def receive_bytes(self, target: memoryview, after_block: Callable[[], None] = lambda: None) -> None:
        """Fill ``target``; what it holds is authenticated only once this returns."""
        for at in range(0, len(target), BLOCK_BYTES):
            block = target[at : at + BLOCK_BYTES]
            head = receive_exactly(self.socket, LENGTH_BYTES + MAC_BYTES)
            if frame_length(head[:LENGTH_BYTES]) != MAC_BYTES + len(block):
                raise TamperedError("a block of another size than announced")
            _receive_into(self.socket, block)
            self.session.verify_frame(head[LENGTH_BYTES:], block)
            after_block()


def connect(
    address: Address, service: str, secret: bytes, timeout: float = HANDSHAKE_TIMEOUT, *, is_bulk: bool = False
) -> Connection:
    """``timeout``: seconds to connect, for each message of the handshake, and from then on for each call. ``is_bulk``:
    gradients may pass what is sent."""
    connection = socket.create_connection(address, timeout=timeout)
    try:
        _configure(connection, is_bulk=is_bulk)
        handshake = ClientHandshake(service, secret, socket.gethostname())
        connection.sendall(handshake.hello(receive_exactly(connection, GREETING_BYTES)))
        session = handshake.session(receive_exactly(connection, WELCOME_BYTES))
        return Connection(connection, session)
    except TamperedError as error:
        connection.close()
        raise type(error)(f"what answers at {address} {error}") from None
    except BaseException:
        connection.close()
        raise


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray(count)
    _receive_into(connection, memoryview(received))
    return bytes(received)


def _receive_into(connection: socket.socket, target: memoryview) -> None:
    at = 0
    while at < len(target):
        count = connection.recv_into(target[at:])
        if count == 0:
            raise ConnectionResetError("the other side has closed it")
        at += count


class Server:
    """Listens at one address, in an event loop of its own. A subclass says what clients get that know the secret.

    >>> server.start()  # in a thread
    >>> server.address
    Address(host='10.0.0.1', port=41213)
    """

    is_bulk = False
    """Whether gradients may pass what it sends."""

    def __init__(self, host: str, port: int, service: str, secret: bytes) -> None:
        """Binds only that address; port 0 is any free one."""
        self._key = sign(secret, service.encode())
        self._socket = _listen(host, port)
        self.address = Address(host, self._socket.getsockname()[1])
        self._unauthenticated = 0
        self._warned_at: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None

    async def attend(self, client: Connection) -> None:
        """Called for each client that knows the secret. Must close the connection; its socket does not block."""
        raise NotImplementedError

    def report(self, text: str) -> None:
        """Called with a line about a rejected client, once a minute for each address."""

    def start(self) -> None:
        self._thread = threading.Thread(target=self.serve, name="z2a-server", daemon=True)
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        if self._loop is not None and self._stopping is not None and not self._loop.is_closed():
            with suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self._stopping.set)
        if self._thread is not None:
            self._thread.join(5)
        if self._loop is None:  # it has never served
            self._socket.close()

    def serve(self) -> None:
        """Serve until ``stop`` is called."""
        asyncio.run(self.run())

    async def run(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        accepting = asyncio.create_task(self._accept())
        self._ready.set()
        try:
            await self._stopping.wait()
        finally:
            accepting.cancel()
            with suppress(asyncio.CancelledError):
                await accepting
            self._socket.close()

    async def _accept(self) -> None:
        while True:
            try:
                connection, (host, *_) = await asyncio.get_running_loop().sock_accept(self._socket)
            except OSError:
                await asyncio.sleep(ACCEPT_PAUSE)  # that client is gone, or there are too many open files
                continue
            if self._unauthenticated >= MAX_UNAUTHENTICATED:
                connection.close()
                continue
            self._unauthenticated += 1
            self.keep(asyncio.create_task(self._admit(connection, host)))

    def keep(self, task: asyncio.Task[None]) -> None:
        """Hold a reference, or it may be collected before it is done."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _admit(self, connection: socket.socket, host: str) -> None:
        client = None
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                client = await self._authenticate(connection, host)
        except OSError:
            pass  # disconnected, or too slow
        finally:
            self._unauthenticated -= 1
            if client is None:
                connection.close()
        if client is not None:
            await self.attend(client)

    async def _authenticate(self, connection: socket.socket, host: str) -> Connection | None:
        _configure(connection, is_bulk=self.is_bulk)
        loop, mine = asyncio.get_running_loop(), secrets.token_bytes(NONCE_BYTES)
        await loop.sock_sendall(connection, MAGIC + mine)
        hello = bytearray()
        while len(hello) < HELLO_BYTES:
            part = await loop.sock_recv(connection, HELLO_BYTES - len(hello))
            if not part:
                return None
            hello += part
        theirs, name = bytes(hello[:NONCE_BYTES]), bytes(hello[NONCE_BYTES:-MAC_BYTES])
        shown = _printable(name)
        if not verify(self._key, bytes(hello[-MAC_BYTES:]), b"client", mine, theirs, name):
            self.warn_once(host, f"rejected node {shown} ({host}): wrong job secret")
            await loop.sock_sendall(connection, REFUSED + bytes(MAC_BYTES))
            return None
        await loop.sock_sendall(connection, WELCOME + sign(self._key, b"server", mine, theirs))
        return Connection(connection, SignedSession(self._key, mine, theirs, is_server=True), shown, host)

    def warn_once(self, host: str, text: str) -> None:
        now = time.monotonic()
        if now - self._warned_at.get(host, -WARNING_INTERVAL) >= WARNING_INTERVAL:
            if len(self._warned_at) >= MAX_UNAUTHENTICATED:
                self._warned_at.clear()
            self._warned_at[host] = now
            self.report(text)


def _printable(name: bytes) -> str:
    """A name from an unauthenticated client, safe to print."""
    text = name.rstrip(b"\0").decode("utf-8", errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text) or "?"


def _listen(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


def _configure(connection: socket.socket, *, is_bulk: bool) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if is_bulk and connection.family == socket.AF_INET:
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, LOW_PRIORITY)
