"""The client side of the rendezvous, for agents and ranks."""

from __future__ import annotations

import base64
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from zero2all.base.console import say
from zero2all.base.environment import JOB_SECRET_VARIABLE
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.network.addresses import local_address_for
from zero2all.base.network.connection import (
    Address,
    Connection,
    TamperedError,
    UnknownServiceError,
    WrongKeyError,
    connect,
)
from zero2all.base.torch_private import Store
from zero2all.cluster.launch.rendezvous_messages import (
    HEARTBEAT_INTERVAL,
    SERVICE,
    AddToValue,
    Attach,
    CheckKeys,
    DeleteKey,
    GetValues,
    Ping,
    RendezvousRequest,
    RendezvousStatus,
    ServerMessage,
    SetValues,
)

CONNECT_TIMEOUT = 10.0  # seconds for one attempt to connect, and for each message of its handshake
FIRST_WORDS = 5.0  # seconds without a connection after which a node says so
RETRY_INTERVAL = 0.5  # seconds between two attempts to connect
SUSPENDED_AFTER = 5 * HEARTBEAT_INTERVAL  # seconds without running after which silence proves nothing
WAIT_INTERVAL = 0.5  # seconds between two looks at what may interrupt a wait
STORE_TIMEOUT = timedelta(seconds=300)


class WrongSecretError(UsageError):
    """A retry would fail too."""


class JobEndedError(RendezvousClosedError):
    """Another node has closed the job. ``done``: because it is done."""

    def __init__(self, *, done: bool) -> None:
        super().__init__("done" if done else "closed by another node")
        self.done = done


class NodeExcludedError(RendezvousClosedError):
    """This node must leave the job, which continues without it."""


@dataclass
class PendingReply:
    """A request that has no answer yet."""

    answer: ServerMessage | None = None
    arrived: threading.Event = field(default_factory=threading.Event)


class RendezvousClient:
    """
    >>> client = RendezvousClient("login:29500", secret, patience=60)
    >>> client.request(CheckKeys(["a"]))
    False
    """

    def __init__(self, endpoint: str, secret: str, patience: float) -> None:
        """Connects, and retries for up to ``patience`` seconds."""
        self.endpoint, self.patience = endpoint, patience
        self.status = RendezvousStatus()
        self.lost_since: float | None = None
        """The time at which a peer of the current round was first reported lost, by this machine's monotonic clock."""
        self._sending, self._number = threading.Lock(), 0
        self._pending: dict[int, PendingReply] = {}
        self._lost_reason: str | None = None
        self._ending = threading.Event()
        self._connection = self._connect(secret.encode())
        self._last_heard = time.monotonic()
        threading.Thread(target=self._read_loop, name="z2a-rendezvous-read", daemon=True).start()

    def start_heartbeat(self) -> None:
        threading.Thread(target=self._heartbeat_loop, name="z2a-rendezvous-beat", daemon=True).start()

    def send(self, request: RendezvousRequest) -> PendingReply:
        pending = PendingReply()
        with self._sending:
            if self._lost_reason is not None:
                raise RendezvousConnectionError(self._lost_reason)
            self._number += 1
            self._pending[self._number] = pending
            try:
                self._connection.send({"id": self._number, "op": type(request).__name__, **asdict(request)})
            except OSError as error:
                self._mark_lost(str(error))
                raise RendezvousConnectionError(str(error)) from None
        return pending

    def request(self, request: RendezvousRequest, timeout: float | None = None) -> Any:
        pending = self.send(request)
        if not pending.arrived.wait(self.patience if timeout is None else timeout):
            raise RendezvousConnectionError(f"no answer from {self.endpoint} in {timeout or self.patience:.0f} s")
        return self.result(pending)

    def result(self, pending: PendingReply) -> Any:
        """The value of an answered request."""
        if pending.answer is None:
            raise RendezvousConnectionError(self._lost_reason or "the connection is closed")
        if (text := pending.answer.error) is None:
            return pending.answer.value
        match pending.answer.kind:
            case "closed":
                raise JobEndedError(done=text == "done")
            case "excluded":
                raise NodeExcludedError(text)
            case "timeout":
                raise RendezvousTimeoutError(text)
            case "usage":
                raise UsageError(f"the rendezvous {self.endpoint} refused: {text}")
            case _:
                raise RendezvousConnectionError(text)

    def raise_if_lost(self) -> None:
        if self._lost_reason is not None:
            raise RendezvousConnectionError(self._lost_reason)

    def close(self) -> None:
        self._ending.set()
        self._mark_lost("closed by this node")

    def _connect(self, secret: bytes) -> Connection:
        host, _, port = self.endpoint.rpartition(":")
        address, begin, logged = Address(host.strip("[]"), int(port)), time.monotonic(), False
        deadline, timeout = begin + self.patience, max(1.0, min(CONNECT_TIMEOUT, self.patience))
        while True:
            try:
                found = connect(address, SERVICE, secret, timeout)
                found.socket.settimeout(None)
                return found
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise RendezvousConnectionError(f"{self.endpoint} does not answer ({error})") from None
                if not logged and time.monotonic() > begin + FIRST_WORDS:
                    logged = True
                    say(
                        f"this node ({socket.gethostname()}) cannot reach the rendezvous at {self.endpoint} (TCP): "
                        f"{error}; trying for {self.patience:.0f} s. Is it running, and is the port open from here?"
                    )
            except TamperedError as error:
                raise self._explain(error) from None
            time.sleep(RETRY_INTERVAL)

    def _explain(self, error: TamperedError) -> UsageError:
        match error:
            case UnknownServiceError():
                return UsageError(
                    f"something else than a rendezvous of this version of zero2all answers at {self.endpoint}: "
                    "check --rdzv-endpoint, and that every machine has the same version"
                )
            case WrongKeyError():
                return WrongSecretError(
                    f"node {socket.gethostname()} ({local_address_for(self.endpoint)}) was refused by the rendezvous "
                    f"{self.endpoint}: wrong job secret: copy the secret file from the machine that hosts it "
                    f"(--secret-file), or set {JOB_SECRET_VARIABLE}"
                )
            case _:
                return WrongSecretError(f"{error}: it is not trusted")

    def _read_loop(self) -> None:
        try:
            while True:
                message = self._connection.receive(ServerMessage)
                self._last_heard = time.monotonic()
                if message.status is not None:
                    self._update_status(message.status)
                elif message.id is None:
                    raise TamperedError("neither an answer nor a status")
                elif (pending := self._pending.pop(message.id, None)) is not None:
                    pending.answer = message
                    pending.arrived.set()
        except OSError as error:
            self._mark_lost(f"the connection to {self.endpoint} is lost ({error})")
        except (TamperedError, Z2aError) as error:
            self._mark_lost(f"{self.endpoint} sent an invalid message ({error})")

    def _update_status(self, status: RendezvousStatus) -> None:
        if not status.lost:
            self.lost_since = None
        elif self.lost_since is None:
            self.lost_since = time.monotonic()
        self.status = status

    def _heartbeat_loop(self) -> None:
        before = time.monotonic()
        while not self._ending.wait(HEARTBEAT_INTERVAL) and self._lost_reason is None:
            now = time.monotonic()
            if now - before > SUSPENDED_AFTER:  # this process was suspended, or its machine
                self._last_heard = now
            if now - self._last_heard > self.patience:
                self._mark_lost(f"no sign of life from {self.endpoint} for {self.patience:.0f} s")
                return
            with suppress(RendezvousConnectionError):
                self.send(Ping())
            before = time.monotonic()  # a blocked send is no suspension: the other side does not read

    def _mark_lost(self, why: str) -> None:
        self._lost_reason = self._lost_reason or why
        self._connection.close()
        for pending in list(self._pending.values()):
            pending.arrived.set()
        self._pending.clear()


class RendezvousStore(Store):
    """The key-value store of a job at its rendezvous, as a torch Store. ``timeout`` is for keys not set yet."""

    def __init__(self, client: RendezvousClient, timeout: timedelta = STORE_TIMEOUT) -> None:
        super().__init__()
        self._client, self._timeout = client, timeout

    @classmethod
    def from_environment(cls, endpoint: str, job: str, timeout: timedelta) -> RendezvousStore:
        """The store of a rank that ``z2a launch`` started."""
        if JOB_SECRET_VARIABLE not in os.environ:
            raise Z2aError(
                f"{JOB_SECRET_VARIABLE} is not set, and the ranks of a job need it: start them with 'z2a launch'"
            )
        client = RendezvousClient(endpoint, os.environ[JOB_SECRET_VARIABLE], timeout.total_seconds())
        client.request(Attach(job))
        return cls(client, timeout)

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: list[str], values: Iterable[str | bytes]) -> None:
        encoded = {key: _encode(value) for key, value in zip(keys, values, strict=True)}
        self._client.request(SetValues(encoded))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._wait_for_values(keys, self.timeout)

    def add(self, key: str, value: int) -> int:
        return int(self._client.request(AddToValue(key, value)))

    def check(self, keys: list[str]) -> bool:
        return bool(self._client.request(CheckKeys(keys)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._wait_for_values(keys, timeout or self.timeout)

    def wait_unless(self, keys: list[str], seconds: float, is_interrupted: Callable[[], bool]) -> bool:
        """Whether they are set in time, and nothing has interrupted the wait."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not is_interrupted():
            try:
                self.wait(keys, timedelta(seconds=WAIT_INTERVAL))
                return True
            except DistStoreError:
                continue
        return False

    def _wait_for_values(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        seconds = timeout.total_seconds()
        try:
            values = self._client.request(GetValues(keys, seconds), timeout=seconds + self._client.patience)
            return [base64.b64decode(value) for value in values]
        except RendezvousTimeoutError as error:
            raise DistStoreError(str(error)) from None  # as torch's own stores

    def delete_key(self, key: str) -> bool:
        return bool(self._client.request(DeleteKey(key)))


def _encode(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else bytes(value)).decode()
