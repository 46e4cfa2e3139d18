"""The part of the rendezvous server that islands use: their connections, and who waits for what."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from zero2all.elastic.island_quorum import (
    Answer,
    EnterIslands,
    Island,
    IslandQuorum,
    ReadyToExchange,
    ReportExchange,
    StartIsland,
)
from zero2all.errors import UsageError

WaitingRequest = StartIsland | ReadyToExchange | ReportExchange


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

    async def wait_for_answer(self, seat: IslandSeat) -> Answer:
        while (answer := seat.island.answer) is None:
            if self.quorum.present.get(seat.island.number) is not seat.island:
                raise ConnectionError("this island was silent for too long")
            changed = self._changed
            await changed.wait()
        seat.island.answer = None
        if isinstance(answer, UsageError):
            raise answer
        return answer

    def leave(self, seat: IslandSeat, is_done: bool = False) -> None:
        self.quorum.leave(seat.island, is_done)
        self.advance()
        self._wake()


@dataclass(frozen=True)
class IslandSeat:
    """The place of a connection in a training."""

    training: IslandTraining
    island: Island

    def heard(self) -> None:
        self.island.last_heard = time.monotonic()

    async def answer(self, request: WaitingRequest) -> Answer:
        quorum = self.training.quorum
        if isinstance(request, StartIsland):
            quorum.start(self.island, request, time.monotonic())
        elif isinstance(request, ReadyToExchange):
            quorum.ready(self.island, request, time.monotonic())
        else:
            quorum.report(self.island, request)
        self.training.advance()
        return await self.training.wait_for_answer(self)


def take_seat(trainings: dict[str, IslandTraining], request: EnterIslands) -> IslandSeat:
    training = trainings.get(request.training)
    if training is None:
        training = trainings[request.training] = IslandTraining(IslandQuorum(request.islands, {}))
    return IslandSeat(training, training.quorum.enter(request, time.monotonic()))
