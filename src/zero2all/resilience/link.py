"""An agent's (or a rank's) end of the connection to the rendezvous."""

from __future__ import annotations

import base64
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from zero2all.errors import UsageError, Z2aError
from zero2all.resilience.rounds import Status
from zero2all.resilience.secret import VARIABLE
from zero2all.resilience.wire import (
    LENGTH,
    LONGEST_NAME,
    MAC,
    MAGIC,
    NONCE,
    WELCOME,
    Channel,
    Message,
    TamperedError,
    client_proof,
    frame_length,
    verify,
)

BEAT = 2.0  # seconds between two signs of life
ASLEEP = 5 * BEAT  # seconds of such a pause after which silence proves nothing
TRY_AGAIN = 0.5
STORE_TIMEOUT = timedelta(seconds=300)


class WrongSecretError(UsageError):
    """Not worth another try."""


class JobEndedError(RendezvousClosedError):
    """Another node has closed the job. ``done``: because it is done."""

    def __init__(self, done: bool) -> None:
        super().__init__("done" if done else "closed by another node")
        self.done = done


@dataclass
class Pending:
    """A request without an answer as yet."""

    answer: Message | None = None
    arrived: threading.Event = field(default_factory=threading.Event)


class Link:
    """
    >>> link = Link("login:29500", secret, patience=60)
    >>> link.ask("check", keys=["a"])
    False
    """

    def __init__(self, place: str, secret: str, patience: float) -> None:
        """Connects, and waits for the rendezvous to be there as long as ``patience`` allows."""
        self.place, self.patience = place, patience
        self.status = Status()
        self.lost_since: float | None = None
        """By this machine's monotonic clock, when a peer of the present round was first reported lost."""
        self._sending, self._number = threading.Lock(), 0
        self._pending: dict[int, Pending] = {}
        self._why_lost: str | None = None
        self._ending = threading.Event()
        self._socket, self._channel = self._connect(secret.encode())
        self._heard = time.monotonic()
        threading.Thread(target=self._read, name="z2a-rendezvous-read", daemon=True).start()

    def keep_alive(self) -> None:
        threading.Thread(target=self._beat, name="z2a-rendezvous-beat", daemon=True).start()

    def send(self, operation: str, **fields: Any) -> Pending:
        pending = Pending()
        with self._sending:
            if self._why_lost is not None:
                raise RendezvousConnectionError(self._why_lost)
            self._number += 1
            self._pending[self._number] = pending
            try:
                self._socket.sendall(self._channel.seal({"id": self._number, "op": operation, **fields}))
            except OSError as error:
                self._lose(str(error))
                raise RendezvousConnectionError(str(error)) from None
        return pending

    def ask(self, operation: str, timeout: float | None = None, **fields: Any) -> Any:
        pending = self.send(operation, **fields)
        if not pending.arrived.wait(self.patience if timeout is None else timeout):
            raise RendezvousConnectionError(f"no answer from {self.place} in {timeout or self.patience:.0f} s")
        return self.value(pending)

    def value(self, pending: Pending) -> Any:
        """Of a request that is answered."""
        if pending.answer is None:
            raise RendezvousConnectionError(self._why_lost or "the connection is closed")
        if "error" not in pending.answer:
            return pending.answer.get("value")
        text = str(pending.answer["error"])
        match pending.answer.get("kind"):
            case "closed":
                raise JobEndedError(text == "done")
            case "timeout":
                raise RendezvousTimeoutError(text)
            case "usage":
                raise UsageError(f"the rendezvous {self.place} refused: {text}")
            case _:
                raise RendezvousConnectionError(text)

    def must_be_there(self) -> None:
        if self._why_lost is not None:
            raise RendezvousConnectionError(self._why_lost)

    def close(self) -> None:
        self._ending.set()
        self._lose("closed by this node")

    def _connect(self, secret: bytes) -> tuple[socket.socket, Channel]:
        host, _, port = self.place.rpartition(":")
        deadline = time.monotonic() + self.patience
        while True:
            try:
                found = socket.create_connection((host.strip("[]"), int(port)), timeout=max(1.0, self.patience))
                try:
                    return found, self._prove(found, secret)
                except BaseException:
                    found.close()
                    raise
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise RendezvousConnectionError(f"{self.place} does not answer ({error})") from None
            time.sleep(TRY_AGAIN)

    def _prove(self, found: socket.socket, secret: bytes) -> Channel:
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = _exactly(found, len(MAGIC) + NONCE)
        if not greeting.startswith(MAGIC):
            raise UsageError(
                f"something else than a rendezvous of this version of zero2all answers at {self.place}: "
                "check --rendezvous, and that every machine has the same version"
            )
        theirs, mine = greeting[len(MAGIC) :], secrets.token_bytes(NONCE)
        name = socket.gethostname().encode()[:LONGEST_NAME]
        found.sendall(mine + bytes([len(name)]) + name + client_proof(secret, theirs, mine, name))
        address = found.getsockname()[0]
        if _exactly(found, 1) != WELCOME:
            raise WrongSecretError(
                f"node {socket.gethostname()} ({address}) was refused by the rendezvous {self.place}: wrong job "
                f"secret: copy the secret file from the machine that holds it (--secret-file), or set {VARIABLE}"
            )
        if not verify(secret, _exactly(found, MAC), b"server", theirs, mine):
            raise WrongSecretError(f"what answers at {self.place} does not know the job secret: it is not trusted")
        found.settimeout(None)
        return Channel(secret, theirs, mine, is_server=False)

    def _read(self) -> None:
        try:
            while True:
                length = frame_length(_exactly(self._socket, LENGTH))
                message = self._channel.open(_exactly(self._socket, length))
                self._heard = time.monotonic()
                if "status" in message:
                    self._hear_status(message["status"])
                elif (pending := self._pending.pop(int(message["id"]), None)) is not None:
                    pending.answer = message
                    pending.arrived.set()
        except OSError as error:
            self._lose(f"the connection to {self.place} is lost ({error})")
        except (TamperedError, KeyError, TypeError, ValueError) as error:
            self._lose(f"{self.place} sent what cannot be trusted ({error})")

    def _hear_status(self, values: Message) -> None:
        status = Status(**{**values, "lost": tuple(values["lost"])})
        if not status.lost:
            self.lost_since = None
        elif self.lost_since is None:
            self.lost_since = time.monotonic()
        self.status = status

    def _beat(self) -> None:
        before = time.monotonic()
        while not self._ending.wait(BEAT) and self._why_lost is None:
            now = time.monotonic()
            if now - before > ASLEEP:  # we ourselves were: stopped, or on a machine that was paused
                self._heard = now
            if now - self._heard > self.patience:
                self._lose(f"no sign of life from {self.place} for {self.patience:.0f} s")
                return
            with suppress(RendezvousConnectionError):
                self.send("beat")
            before = time.monotonic()  # a send that blocks is not sleep: the other side does not read

    def _lose(self, why: str) -> None:
        self._why_lost = self._why_lost or why
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for pending in list(self._pending.values()):
            pending.arrived.set()
        self._pending.clear()


class LinkStore(Store):
    """The values that a job keeps at its rendezvous, as a store of torch. ``timeout`` is for those not yet there."""

    def __init__(self, link: Link, timeout: timedelta = STORE_TIMEOUT) -> None:
        super().__init__()
        self._link, self._timeout = link, timeout

    @classmethod
    def of_this_rank(cls, place: str, job: str, timeout: timedelta) -> LinkStore:
        """For a rank that ``z2a launch`` started."""
        if VARIABLE not in os.environ:
            raise Z2aError(f"{VARIABLE} is not set, and the ranks of a job need it: start them with 'z2a launch'")
        link = Link(place, os.environ[VARIABLE], timeout.total_seconds())
        link.ask("attach", job=job)
        return cls(link, timeout)

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: list[str], values: Iterable[str | bytes]) -> None:
        encoded = {key: _encoded(value) for key, value in zip(keys, values, strict=True)}
        self._link.ask("set", values=encoded)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [base64.b64decode(value) for value in self._once_there("get", keys, self.timeout)]

    def add(self, key: str, value: int) -> int:
        return int(self._link.ask("add", key=key, amount=value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._link.ask("check", keys=keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._once_there("until", keys, timeout or self.timeout)

    def _once_there(self, operation: str, keys: list[str], timeout: timedelta) -> Any:
        seconds = timeout.total_seconds()
        try:
            return self._link.ask(operation, timeout=seconds + self._link.patience, keys=keys, seconds=seconds)
        except RendezvousTimeoutError as error:
            raise DistStoreError(str(error)) from None  # as torch's own stores

    def delete_key(self, key: str) -> bool:
        return bool(self._link.ask("delete", key=key))


def _encoded(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else bytes(value)).decode()


def _exactly(found: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = found.recv(count - len(parts))
        if not part:
            raise ConnectionResetError("the other side has closed it")
        parts += part
    return bytes(parts)
