"""Islands as threads of one process, at a rendezvous of their own: real sockets, and no time for starting processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from zero2all.base.environment import ISLAND_VARIABLE, ISLANDS_ENDPOINT_VARIABLE, ISLANDS_SECRET_VARIABLE
from zero2all.cluster.launch.islands.quorum import IslandQuorum
from zero2all.cluster.launch.rendezvous_server import RendezvousServer
from zero2all.recipe import ExtendMode, Recipe
from zero2all.train import TrainerHooks, TrainSummary
from zero2all.train.trainer import Trainer

SECRET = "a secret of this test only"
TIMEOUT = 240.0


@dataclass
class IslandThread:
    trainer: Trainer
    thread: threading.Thread | None = None
    summary: TrainSummary | None = None
    error: BaseException | None = None

    def run(self) -> None:
        try:
            with self.trainer:
                self.summary = self.trainer.train()
        except BaseException as error:  # raised again by ``end``
            self.error = error

    def start(self) -> IslandThread:
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        return self

    def end(self) -> TrainSummary:
        """Wait until it has trained; raises what it has raised."""
        assert self.thread is not None
        self.thread.join(TIMEOUT)
        assert not self.thread.is_alive(), "the island did not end in time"
        if self.error is not None:
            raise self.error
        assert self.summary is not None
        return self.summary


@dataclass
class ThreadIslands:
    """
    >>> islands.train(recipe)  # all of them, to the end
    """

    server: RendezvousServer
    made: list[IslandThread] = field(default_factory=list)

    def wait_until(self, condition: Callable[[IslandQuorum], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not any(condition(training.quorum) for training in list(self.server.islands.by_name.values())):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def make(
        self, recipe: Recipe, island: int, hooks: TrainerHooks | None = None, extend: ExtendMode | None = None
    ) -> IslandThread:
        """In this thread: building a model uses the random numbers of the process."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(ISLAND_VARIABLE, str(island))
            patch.setenv(ISLANDS_ENDPOINT_VARIABLE, self.server.endpoint)
            patch.setenv(ISLANDS_SECRET_VARIABLE, SECRET)
            self.made.append(IslandThread(Trainer(recipe, hooks, extend=extend)))
        return self.made[-1]

    def train(
        self,
        recipe: Recipe,
        hooks: Callable[[int], TrainerHooks] = lambda island: TrainerHooks(),
        extend: ExtendMode | None = None,
    ) -> None:
        islands = [self.make(recipe, number, hooks(number), extend) for number in range(recipe.parallel.sync.islands)]
        for island in islands:
            island.start()
        for island in islands:
            island.end()


@contextmanager
def thread_islands() -> Iterator[ThreadIslands]:
    server = RendezvousServer("127.0.0.1", 0, SECRET)
    server.start()
    try:
        yield ThreadIslands(server)
    finally:
        server.stop()
