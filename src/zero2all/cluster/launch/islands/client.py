"""The connection of an island to the rendezvous of all islands. Rank 0 has it, and speaks for the other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from zero2all.base.console import say
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.records import parse_record
from zero2all.cluster.launch.islands.messages import (
    EnterIslands,
    LeaveIslands,
    OutcomeAnswer,
    QuorumAnswer,
    ReadyToExchange,
    ReportExchange,
    StartAnswer,
    StartIsland,
)
from zero2all.cluster.launch.rendezvous_client import RendezvousClient
from zero2all.cluster.launch.rendezvous_messages import RendezvousRequest

ANSWER_TIMEOUT = 10.0  # seconds for an answer that waits for nobody, and without a sign of life
CONNECT_PATIENCE = 60.0  # seconds for the rendezvous to appear
RECONNECT_PATIENCE = 600.0  # seconds without the rendezvous, once it was there, after which the island gives up
TAKEN_PATIENCE = 30.0  # seconds: a process of this island that was killed may not be missed yet
RETRY_INTERVAL = 1.0
_POLL_INTERVAL = 0.5

STOP_PATIENCE = 20.0  # seconds that a process that was asked to stop still waits for other islands: it must save


class GivenUpError(Exception):
    """This process was asked to stop while it waited for other islands."""


AnswerType = TypeVar("AnswerType", StartAnswer, QuorumAnswer, OutcomeAnswer)


class IslandClient:
    """Requests are repeated over new connections while the rendezvous is away: they mean the same then.

    >>> client = IslandClient("login:29500", secret, EnterIslands("run", 0, 2, identity, addresses, patience=60))
    >>> client.start(exchange=-1, digest="d").present
    [0, 1]
    """

    def __init__(
        self,
        endpoint: str,
        secret: str,
        own: EnterIslands,
        on_wait: Callable[[], None] = lambda: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.own = own
        self._endpoint, self._secret, self._on_wait, self._is_stopping = endpoint, secret, on_wait, is_stopping
        self._stop_seen: float | None = None
        self._client: RendezvousClient | None = None
        self._patience = CONNECT_PATIENCE

    def start(self, exchange: int, digest: str) -> StartAnswer:
        return self._ask(StartIsland(exchange, digest), StartAnswer)

    def ready(self, exchange: int, last: int) -> QuorumAnswer:
        return self._ask(ReadyToExchange(exchange, last), QuorumAnswer)

    def report(self, exchange: int, attempt: int, failed: list[int]) -> OutcomeAnswer:
        return self._ask(ReportExchange(exchange, attempt, failed), OutcomeAnswer)

    def close(self, *, is_done: bool) -> None:
        if self._client is not None:
            if is_done:
                with suppress(RendezvousConnectionError):
                    self._client.request(LeaveIslands())
            self._client.close()

    def _ask(self, request: RendezvousRequest, answer: type[AnswerType]) -> AnswerType:
        lost_since: float | None = None
        while True:
            try:
                if self._client is None:
                    self._client = self._connect()
                lost_since, self._patience = None, RECONNECT_PATIENCE
                return parse_record(answer, self._wait(self._client, request), self._endpoint)
            except RendezvousConnectionError as error:
                if self._client is not None:
                    self._client.close()
                    self._client = None
                now = time.monotonic()
                if lost_since is None:
                    lost_since = now
                    say(f"waiting for the rendezvous of the islands ({error})")
                if now - lost_since >= self._patience:
                    raise Z2aError(
                        f"no rendezvous of the islands ({error}): start 'z2a launch --rendezvous-only' there, "
                        "then this island again; it resumes from its newest checkpoint"
                    ) from None
            self._check_stop()
            time.sleep(RETRY_INTERVAL)

    def _check_stop(self) -> None:
        """Called while waiting."""
        self._on_wait()
        if self._is_stopping():
            self._stop_seen = self._stop_seen or time.monotonic()
            if time.monotonic() - self._stop_seen >= STOP_PATIENCE:
                if self._client is not None:  # the others need not wait for this island any more
                    self._client.close()
                    self._client = None
                raise GivenUpError

    def _wait(self, client: RendezvousClient, request: RendezvousRequest) -> object:
        pending = client.send(request)
        while not pending.arrived.wait(_POLL_INTERVAL):
            self._check_stop()
        return client.result(pending)

    def _connect(self) -> RendezvousClient:
        client = RendezvousClient(self._endpoint, self._secret, ANSWER_TIMEOUT)
        try:
            deadline = time.monotonic() + TAKEN_PATIENCE
            while True:
                pending = client.send(self.own)
                if not pending.arrived.wait(ANSWER_TIMEOUT):
                    raise RendezvousConnectionError(f"no answer from {self._endpoint}")
                if pending.answer is None or pending.answer.kind != "taken":
                    client.result(pending)
                    break
                if time.monotonic() >= deadline:
                    raise UsageError(str(pending.answer.error))
                self._check_stop()
                time.sleep(RETRY_INTERVAL)
            client.start_heartbeat()
            return client
        except BaseException:
            client.close()
            raise
