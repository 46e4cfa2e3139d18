"""Islands: jobs that each train a part of every batch with their own inner optimizer, and exchange pseudo-gradients
every few steps for an outer step (DiLoCo).

``after_update`` is called after every inner step. An exchange starts where one is due, runs in a thread, and is merged
into the weights exactly ``overlap`` steps later, so that the result does not depend on the speed of the network.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zero2all.base.console import say
from zero2all.base.environment import ISLAND_VARIABLE, ISLANDS_ENDPOINT_VARIABLE, ISLANDS_SECRET_VARIABLE
from zero2all.base.errors import Interrupted, UsageError, Z2aError
from zero2all.base.io import fingerprint
from zero2all.base.workspace import MAX_NAME_PARTS
from zero2all.checkpoint import RankGroup, RunIdentity
from zero2all.checkpoint.background import run_in_background
from zero2all.checkpoint.state_dict import local_shard
from zero2all.checkpoint.training_state import IslandsState
from zero2all.parallel import ParallelModel
from zero2all.parallel.gradient_norms import replica_count
from zero2all.recipe import Recipe
from zero2all.train.diloco.link import CompletedExchange, IslandLink, IslandPlace, Missed, NetworkLink
from zero2all.train.diloco.outer_optimizer import OuterOptimizer, ReplicaShare, exchange_offset, fragment_due

WAIT_INTERVAL = 1.0  # seconds between two heartbeats while waiting
FRAGMENT_NUMBERS = 1 << 16
"""The number of an exchange is the steps done, times this, plus the number of its fragment. So later exchanges have
larger numbers, also if the number of fragments is changed between two starts."""
START_PATIENCE = 120.0  # seconds that a start waits for all islands; who comes later takes over the state of the others


class EventRecorder(Protocol):
    def __call__(self, event: str, /, **details: Any) -> None: ...


@dataclass
class OutstandingExchange:
    """An exchange that has started and is not merged yet."""

    exchange: int
    fragments: Sequence[int]
    merge_at: int
    """After how many steps."""
    result: Future[CompletedExchange | Missed] | None
    """None after the outer step."""
    has_recipients: bool = False


class Islands:
    """
    >>> islands = Islands(outer, link, total_steps=1000)
    >>> step = islands.start(step)  # another island's, if this one is behind
    >>> moved_to = islands.after_update(done=step + 1)
    """

    def __init__(
        self,
        outer: OuterOptimizer,
        link: IslandLink,
        total_steps: int,
        replica_counts: dict[str, int] | None = None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """``replica_counts``: how many ranks of this island hold the same shard of a weight, if more than one."""
        self.outer, self.recipe, self.link, self.total_steps = outer, outer.recipe, link, total_steps
        self.on_event: EventRecorder = lambda event, /, **details: None
        self._on_wait = on_wait
        self._replica_counts = replica_counts or {}
        self.exchange = -1
        """The last one that is complete; see ``IslandsState``."""
        self._outstanding: OutstandingExchange | None = None
        self._metrics: dict[str, float] = {}
        self._present: list[int] = []

    # State

    def state(self) -> IslandsState:
        """For a checkpoint; the outstanding exchange must be complete (``after_update``)."""
        outstanding = self._outstanding
        return IslandsState(self.exchange, None if outstanding is None else outstanding.merge_at)

    def restore(self, state: IslandsState | None) -> None:
        """After the tensors of a checkpoint were loaded; None if they had none."""
        self._outstanding = None
        if state is None:
            self.outer.reset()
            self.exchange = -1
            return
        self.exchange = state.exchange
        if state.merge_at is not None:
            if self.recipe.overlap == 0:
                raise UsageError(
                    "the newest checkpoint has an outstanding exchange: resume with parallel.sync.overlap as it was"
                )
            # All fragments, whose number may have changed: those without an outstanding exchange have nothing to merge.
            self._outstanding = OutstandingExchange(state.exchange, range(self.recipe.fragments), state.merge_at, None)

    def start(self, step: int) -> int:
        """Meet the other islands; the number of steps to continue from."""
        if step < self.total_steps or self._unfinished() is not None:
            step = self._join(step)
        if step == self.total_steps and (moved_to := self._exchange_last()) is not None:
            return moved_to
        return step

    def is_due(self, done: int) -> bool:
        """Whether ``after_update`` has something to do."""
        merges = self._outstanding is not None and self._outstanding.merge_at == done
        return merges or fragment_due(done, self.recipe) is not None or done == self.total_steps

    def after_update(self, done: int, *, complete: bool = False) -> int | None:
        """After every inner step. The number of steps to continue from, if this island was behind and has the state of
        a different one now. ``complete``: a checkpoint follows, so the outstanding exchange must complete."""
        if done == self.total_steps:
            return self._exchange_last()
        fragment = fragment_due(done, self.recipe)
        # One of a checkpoint may be outstanding where the next is due: ``every`` or ``fragments`` was changed.
        if self._outstanding is not None and (self._outstanding.merge_at <= done or fragment is not None):
            moved_to = self._finish_exchange(done)
            if moved_to is not None:
                return moved_to
        if fragment is not None:
            self._begin(done, fragment, done + self.recipe.overlap)
            if self.recipe.overlap == 0:
                return self._finish_exchange(done)
        if complete and self._outstanding is not None and self._complete(self._outstanding) == "behind":
            return self._catch_up(done)
        return None

    @property
    def has_outstanding_exchange(self) -> bool:
        """Whether a checkpoint would have to wait for the result of an exchange."""
        return self._outstanding is not None and self._outstanding.result is not None

    def take_metrics(self) -> dict[str, float]:
        """The metrics of the last exchange that completed, once."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    @contextmanager
    def session(self, on_event: EventRecorder, step: int) -> Iterator[int]:
        """Around training: wait for the others; the number of steps to continue from."""
        self.on_event, is_done = on_event, False
        try:
            yield self.start(step)
            is_done = True
        finally:
            self.link.close(is_done=is_done)

    # One exchange

    def _begin(self, done: int, fragment: int, merge_at: int) -> None:
        number, last = done * FRAGMENT_NUMBERS + fragment, self.exchange
        pseudo_gradient = self.outer.start_exchange(fragment)
        result: Future[CompletedExchange | Missed] = Future()

        def exchange() -> None:
            try:
                result.set_result(self.link.exchange(number, last, self.outer.encode(fragment, pseudo_gradient)))
            except BaseException as error:  # raised where it is waited for
                result.set_exception(error)

        # It is as important as training, which soon waits for it: at a lower priority, 0.06 s of work took 0.7 s on a
        # core that both share.
        run_in_background(exchange, niceness=0)
        self._outstanding = OutstandingExchange(number, [fragment], merge_at, result)

    def _complete(self, outstanding: OutstandingExchange) -> Missed | None:
        """Wait for the result of an exchange and take the outer step; why not, if there is none."""
        if outstanding.result is None:
            return None
        begin = time.perf_counter()
        exchanged = self._wait(outstanding.result)
        waited = time.perf_counter() - begin
        if not isinstance(exchanged, CompletedExchange):
            self._outstanding = None
            for fragment in outstanding.fragments:
                self.outer.discard(fragment)
            self.on_event("exchange missed", exchange=outstanding.exchange, reason=exchanged)
            return exchanged
        [fragment] = outstanding.fragments
        squares = self.outer.update(fragment, exchanged.parts)
        outstanding.result, outstanding.has_recipients, self.exchange = (
            None,
            exchanged.has_recipients,
            outstanding.exchange,
        )
        self._report_present(exchanged.members)
        done = outstanding.exchange // FRAGMENT_NUMBERS
        self._metrics = {
            "islands/round": (done + exchange_offset(fragment, self.recipe)) // self.recipe.every,
            "islands/present": len(exchanged.members),
            "islands/bytes": exchanged.bytes,
            "islands/wait": round(waited, 6),
            "islands/delta_norm": self._norm(fragment, squares),
        }
        return None

    def _norm(self, fragment: int, squares: list[float]) -> float:
        names = self.outer.fragments[fragment].weights
        own = sum(square / self._replica_counts.get(name, 1) for name, square in zip(names, squares, strict=True))
        return math.sqrt(float(self.link.gather(repr(own), lambda parts: repr(sum(map(float, parts))))))

    def _finish_exchange(self, done: int, *, exactly: bool = False) -> int | None:
        """Merge the outstanding exchange into the weights."""
        assert self._outstanding is not None
        outstanding = self._outstanding
        match self._complete(outstanding):
            case "behind":
                return self._catch_up(done)
            case "given up":
                return None
        for fragment in outstanding.fragments:
            self.outer.merge(fragment, exactly=exactly)
        self._outstanding = None
        if outstanding.has_recipients:
            self.link.publish_state(self.exchange, done, self.outer.shared_tensors)
        return None

    def _exchange_last(self) -> int | None:
        """After the last step: exchange all fragments, so that all islands end with the same weights."""
        if self._outstanding is not None and (moved_to := self._finish_exchange(self.total_steps)) is not None:
            return self._exchange_last() if moved_to == self.total_steps else moved_to
        while (fragment := self._unfinished()) is not None:
            self._begin(self.total_steps, fragment, self.total_steps)
            before = self.exchange
            moved_to = self._finish_exchange(self.total_steps, exactly=True)
            if moved_to is not None and moved_to < self.total_steps:
                return moved_to
            if self.exchange == before and moved_to is None:
                raise Interrupted("stopped before the last exchange with the other islands; the same command resumes")
        return None

    def _unfinished(self) -> int | None:
        """The next fragment to exchange after the last step."""
        fragment = max(0, self.exchange + 1 - self.total_steps * FRAGMENT_NUMBERS)
        return fragment if fragment < self.recipe.fragments else None

    def _wait(self, result: Future[CompletedExchange | Missed]) -> CompletedExchange | Missed:
        # Not result(timeout): an exchange that failed with a TimeoutError would be waited for without end.
        while not wait([result], WAIT_INTERVAL).done:
            self._on_wait()
        return result.result()

    # Meeting the others

    def _join(self, step: int) -> int:
        """Wait until this island may train, with its own state or another island's."""
        while True:
            answer = self.link.start(self.exchange, self._digest())
            if answer.source is None:
                break
            found = self.link.fetch_state(answer, self.outer.shared_tensors)
            if found is not None:
                if not 0 <= found <= self.total_steps:
                    raise Z2aError(f"island {answer.source} says that it has trained {found} steps: is it broken?")
                self.outer.adopt_shared()
                self.exchange, self._outstanding = answer.exchange, None
                self.on_event("caught up", step=found, island=answer.source, before=step)
                say(f"this island continues after step {found} with the weights of island {answer.source}")
                step = found
                break
        self._report_present(answer.present)
        if answer.recipients:
            if self._outstanding is not None:
                self._outstanding.has_recipients = True  # they take it when it is merged
            else:
                self.link.publish_state(self.exchange, step, self.outer.shared_tensors)
        return step

    def _catch_up(self, done: int) -> int:
        say("this island is behind the others, and waits to take over their state after their next exchange")
        return self._join(done)

    def _digest(self) -> str:
        """A hash of what must be the same on all islands."""
        digest = hashlib.sha256()
        for tensor in self.outer.shared_tensors:
            digest.update(tensor.view(torch.uint8).numpy().data)
        return self.link.gather(digest.hexdigest(), lambda parts: hashlib.sha256("".join(parts).encode()).hexdigest())

    def _report_present(self, present: list[int]) -> None:
        if present == self._present:
            return
        gone, new = sorted({*self._present} - {*present}), sorted({*present} - {*self._present})
        if self._present:
            say(f"islands present: {', '.join(map(str, present))}")
        self._present = present
        self.on_event("islands", present=present, gone=gone, new=new)


def island_place(recipe: Recipe) -> IslandPlace | None:
    """None if the recipe has one island: then nothing is exchanged."""
    islands = recipe.parallel.sync.islands
    if islands == 1:
        if ISLAND_VARIABLE in os.environ:
            raise UsageError("--island is for recipes with parallel.sync.islands > 1")
        return None
    if ISLAND_VARIABLE not in os.environ:
        raise UsageError(
            f"the recipe has {islands} islands (parallel.sync.islands): start 'z2a launch --rendezvous-only', "
            "then each of them with 'z2a launch --island NUMBER --islands-endpoint HOST:PORT -- train RECIPE'"
        )
    island = int(os.environ[ISLAND_VARIABLE])
    if island >= islands:
        raise UsageError(f"--island {island}: parallel.sync.islands is {islands}, and they are numbered from 0")
    return IslandPlace(island, islands, os.environ[ISLANDS_ENDPOINT_VARIABLE], os.environ[ISLANDS_SECRET_VARIABLE])


def with_island_run(recipe: Recipe, place: IslandPlace | None) -> Recipe:
    """With a run directory of its own: ``run/island-0``. A recipe that was stored there has it already."""
    if place is None or recipe.run.endswith(_suffix(place)):
        return recipe
    if recipe.run.count("/") + 1 >= MAX_NAME_PARTS:
        raise UsageError(f"run: {recipe.run} has no room for the directories of islands: give it fewer parts")
    return recipe.model_copy(update={"run": recipe.run + _suffix(place)})


def _suffix(place: IslandPlace) -> str:
    return f"/island-{place.island}"


def build_outer_optimizer(recipe: Recipe, model: ParallelModel) -> OuterOptimizer:
    mesh, share = model.mesh, None
    if mesh.dims.dp_replicate > 1:
        group = mesh.get_mesh("dp_replicate").get_group()

        def add_up(own: Tensor) -> Tensor:
            total = own.to(mesh.device)
            dist.all_reduce(total, group=group)
            return total.cpu()

        share = ReplicaShare(mesh.coordinate("dp_replicate"), mesh.dims.dp_replicate, add_up)
    return OuterOptimizer(model.model, model.config.num_hidden_layers, recipe.parallel.sync, share)


@dataclass(frozen=True)
class IslandRun:
    """What an island trains."""

    place: IslandPlace
    recipe: Recipe
    identity: RunIdentity
    total_steps: int


def connect_islands(
    run: IslandRun,
    model: ParallelModel,
    outer: OuterOptimizer,
    on_wait: Callable[[], None],
    is_stopping: Callable[[], bool],
) -> Islands:
    """Called on all ranks; the other islands are met in ``Islands.start``."""
    recipe, identity = run.recipe, run.identity
    ranks = RankGroup()  # its own group: exchanges run in a thread
    names = {name: tensor for fragment in outer.fragments for name, tensor in fragment.weights.items()}
    layout = [(name, list(local_shard(tensor).shape), str(tensor.dtype)) for name, tensor in names.items()]
    same = {
        "parallel layout": ranks.gather(lambda: fingerprint(layout), fingerprint),
        "parallel.sync": fingerprint(recipe.parallel.sync.model_dump(mode="json")),
        "model": fingerprint(identity.model),
        "tokenizer": identity.tokenizer,
        "data": fingerprint([asdict(stage) for stage in identity.stages]),
        "optimizer": identity.optimizer,
        "seed": str(recipe.seed),
        "number of steps": str(run.total_steps),
    }
    link = NetworkLink(
        run.place,
        f"{recipe.name}/{recipe.run.removesuffix(_suffix(run.place))}",
        same,
        ranks,
        patience=START_PATIENCE,
        on_wait=on_wait,
        is_stopping=is_stopping,
    )
    counts = {name: replica_count(model.mesh, tensor) for name, tensor in names.items()}
    return Islands(outer, link, run.total_steps, counts, on_wait)
