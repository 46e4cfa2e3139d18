"""The islands of all trainings that meet at a rendezvous: its handlers of their requests."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from zero2all.base.errors import UsageError
from zero2all.cluster.launch.islands.messages import (
    EnterIslands,
    IslandAnswer,
    LeaveIslands,
    ReadyToExchange,
    ReportExchange,
    StartIsland,
    WaitingRequest,
)
from zero2all.cluster.launch.islands.quorum import Island, IslandQuorum, IslandTakenError
from zero2all.cluster.launch.rendezvous_job import Handler, Peer
from zero2all.cluster.launch.rendezvous_messages import RendezvousRequest, RequestError


@dataclass
class IslandTraining:
    """One of the trainings whose islands meet here. It is kept when all have left: they may come back."""

    quorum: IslandQuorum
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def advance(self) -> None:
        before = list(self.quorum.present.values())
        self.quorum.advance(time.monotonic())
        present = list(self.quorum.present.values())
        if present != before or any(island.answer is not None for island in present):
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def answer(self, island: Island, request: WaitingRequest) -> IslandAnswer:
        if isinstance(request, StartIsland):
            self.quorum.start(island, request, time.monotonic())
        elif isinstance(request, ReadyToExchange):
            self.quorum.ready(island, request, time.monotonic())
        else:
            self.quorum.report(island, request)
        self.advance()
        while (answer := island.answer) is None:
            if self.quorum.present.get(island.number) is not island:
                raise RequestError("lost", "this island was silent for too long")
            changed = self._changed
            await changed.wait()
        island.answer = None
        if isinstance(answer, UsageError):
            raise answer
        return answer

    def leave(self, island: Island, *, is_done: bool = False) -> None:
        self.quorum.leave(island, is_done=is_done)
        self.advance()
        self._wake()


class IslandTrainings:
    """
    >>> trainings = IslandTrainings()
    >>> answer = trainings.handlers()[StartIsland](peer, StartIsland(exchange=-1, digest="d"))
    """

    def __init__(self) -> None:
        self.by_name: dict[str, IslandTraining] = {}
        self._seats: dict[Peer, tuple[IslandTraining, Island]] = {}

    def handlers(self) -> dict[type[RendezvousRequest], Handler]:
        return {
            EnterIslands: self._enter,
            LeaveIslands: self._leave,
            StartIsland: self._answer,
            ReadyToExchange: self._answer,
            ReportExchange: self._answer,
        }

    def advance(self) -> None:
        for training in self.by_name.values():
            training.advance()

    def record_heartbeat(self, peer: Peer) -> None:
        if peer in self._seats:
            self._seats[peer][1].last_heard = time.monotonic()

    def disconnect(self, peer: Peer) -> None:
        if peer in self._seats:
            training, island = self._seats.pop(peer)
            training.leave(island)

    def _enter(self, peer: Peer, request: EnterIslands) -> None:
        training = self.by_name.get(request.training)
        if training is None:
            training = self.by_name[request.training] = IslandTraining(IslandQuorum(request.islands, {}))
        try:
            self._seats[peer] = (training, training.quorum.enter(request, time.monotonic()))
        except IslandTakenError as error:
            raise RequestError("taken", str(error)) from None

    async def _answer(self, peer: Peer, request: WaitingRequest) -> IslandAnswer:
        if peer not in self._seats:
            raise RequestError("usage", "enter the islands of a training first")
        training, island = self._seats[peer]
        return await training.answer(island, request)

    def _leave(self, peer: Peer, request: LeaveIslands) -> None:
        if peer in self._seats:
            training, island = self._seats[peer]
            training.leave(island, is_done=True)
