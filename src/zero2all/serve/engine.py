"""One thread that generates for all requests of a server, with continuous batching."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from zero2all.console import warn
from zero2all.errors import Z2aError
from zero2all.generation.decoder import Decoder, Request, TextPiece
from zero2all.generation.rank_model import LocalModel
from zero2all.hardware import on_current_device
from zero2all.model import Z2all
from zero2all.model.decode_step import join_projections
from zero2all.tokenizer import Tokenizer

IDLE_SECONDS = 0.5  # between two looks at whether the server stops


class BusyError(Z2aError):
    """As many requests wait as are allowed."""


@dataclass(frozen=True)
class Failure:
    """In place of the last piece of a text."""

    index: int
    reason: str


Receive = Callable[[TextPiece | Failure], None]
"""Called by the thread of the engine; must return at once."""


@dataclass
class EngineStats:
    """Since the start."""

    requests: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    first_token_seconds: list[float] = field(default_factory=list)
    """From the request to its first token, of the newest requests."""


@dataclass
class _Job:
    receive: Receive
    submitted: float
    answered: bool = False


class Engine:
    """Generates in its own thread. ``submit`` and ``cancel`` may be called from any other.

    >>> with Engine(model, tokenizer, rows=8, max_waiting=64) as engine:
    ...     engine.submit([Request(0, ids, 100, SamplingParams())], print)
    """

    def __init__(
        self, model: Z2all, tokenizer: Tokenizer, rows: int, max_waiting: int, context: int | None = None
    ) -> None:
        """``context`` bounds prompt and answer together, by default that of the model: each row has memory for it."""
        config = model.config
        self.context = min(context or config.max_position_embeddings, config.max_position_embeddings)
        weight = model.embed_tokens.weight
        self.cache_bytes = (
            2 * rows * self.context * config.num_hidden_layers * config.num_key_value_heads * config.head_size
        ) * weight.element_size()
        self.rows, self._max_waiting = rows, max_waiting
        self.stats = EngineStats()
        join_projections(model)  # it is the engine's own
        self._decoder = Decoder(LocalModel(model), tokenizer, rows, self.context)
        self._lock, self._jobs = threading.Lock(), dict[int, _Job]()
        # Requests, and the numbers of those to cancel.
        self._orders: queue.SimpleQueue[Request | int] = queue.SimpleQueue()
        self._next, self._stopped = 0, threading.Event()
        self._thread = threading.Thread(target=on_current_device(self._run), name="engine", daemon=True)

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def active(self) -> int:
        """Requests that are being generated."""
        return self._decoder.active

    @property
    def waiting(self) -> int:
        with self._lock:
            return len(self._jobs) - self._decoder.active

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, requests: Sequence[Request], receive: Receive) -> list[int]:
        """Start to generate all of them; their numbers, for ``cancel``, are those that pieces name.

        Raises ``BusyError`` if too many wait already. An idle engine takes any number.
        """
        with self._lock:
            if self._jobs and len(self._jobs) + len(requests) > self._max_waiting + self.rows:
                self.stats.refused += 1
                raise BusyError(f"{len(self._jobs)} answers are generated or wait: try again later")
            numbers = list(range(self._next, self._next + len(requests)))
            self._next += len(requests)
            self._jobs |= {number: _Job(receive, time.monotonic()) for number in numbers}
            self.stats.requests += len(requests)
            self.stats.prompt_tokens += sum(len(request.prompt_tokens) for request in requests)
        for number, request in zip(numbers, requests, strict=True):
            self._orders.put(replace(request, index=number))
        return numbers

    def cancel(self, number: int) -> None:
        """Forget a request; one that has ended is ignored."""
        with self._lock:
            if self._jobs.pop(number, None) is None:
                return
            self.stats.cancelled += 1
        self._orders.put(number)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._take_orders()
            if self._decoder.finished:
                continue
            begin = time.monotonic()
            try:
                pieces = self._decoder.step()
            except Exception as error:  # of the model or a constraint: the server must go on answering
                warn(f"generation failed: {type(error).__name__}: {error}")
                self._fail_all(str(error) if isinstance(error, Z2aError) else type(error).__name__)
                continue
            self.stats.steps += 1
            self.stats.busy_seconds += time.monotonic() - begin
            for piece in pieces:
                self._deliver(piece)

    def _take_orders(self) -> None:
        """All that were given; waits for one if there is nothing to do."""
        wait = self._decoder.finished
        while True:
            try:
                order = self._orders.get(timeout=IDLE_SECONDS) if wait else self._orders.get_nowait()
            except queue.Empty:
                return
            wait = False
            if isinstance(order, Request):
                with self._lock:
                    is_wanted = order.index in self._jobs
                if is_wanted:
                    self._decoder.add(order)
            else:
                self._decoder.remove(order)

    def _deliver(self, piece: TextPiece) -> None:
        with self._lock:
            job = self._jobs.get(piece.index)
            if job is None:
                return  # cancelled
            if not job.answered:
                job.answered = True
                self.stats.first_token_seconds.append(time.monotonic() - job.submitted)
                del self.stats.first_token_seconds[:-1000]
            if piece.completion is not None:
                del self._jobs[piece.index]
                self.stats.completed += 1
                self.stats.generated_tokens += len(piece.completion.tokens)
        job.receive(piece)

    def _fail_all(self, reason: str) -> None:
        """After an error nothing is known of the rows, so none of them is used again."""
        with self._lock:
            jobs, self._jobs = self._jobs, {}
            self.stats.failed += len(jobs)
        self._decoder.clear()
        for number, job in jobs.items():
            job.receive(Failure(number, reason))
