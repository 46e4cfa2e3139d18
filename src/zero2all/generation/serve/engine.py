"""One thread that generates for all requests of a server, with continuous batching."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from zero2all.base.console import warn
from zero2all.base.errors import Z2aError
from zero2all.base.machine.devices import on_current_device
from zero2all.generation.decoder import Decoder, DecoderSize, GenerationRequest, TextPiece
from zero2all.generation.rank_model import LocalModel
from zero2all.model import Z2all
from zero2all.model.decode_step import join_projections
from zero2all.tokenizer import Tokenizer
from zero2all.track.prometheus import family_text

PREFIX = "zero2all_serve_"
QUANTILES = (0.5, 0.9, 0.99)

REQUEST_CAPACITY = 4  # times the answers that are generated and wait: the most that one request may ask for
IDLE_SECONDS = 0.5  # between two looks at whether the server stops


class TooManyAnswersError(Z2aError):
    """One request asks for more answers than the server ever takes."""


class BusyError(Z2aError):
    """The queue has no place for another request."""


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
    group: int
    """The index of the first request that was submitted with it."""
    submitted: float
    answered: bool = False


class ServingEngine:
    """Generates in its own thread. ``submit`` and ``cancel`` may be called from any other.

    >>> with ServingEngine(model, tokenizer, rows=8, max_waiting=64) as engine:
    ...     engine.submit([GenerationRequest(0, ids, 100, SamplingParams())], print)
    """

    def __init__(
        self, model: Z2all, tokenizer: Tokenizer, rows: int, max_waiting: int, context: int | None = None
    ) -> None:
        """``context`` bounds prompt and answer together, by default the model's: each row has memory for it."""
        config = model.config
        self.context = min(context or config.max_position_embeddings, config.max_position_embeddings)
        weight = model.embed_tokens.weight
        self.cache_bytes = (
            2 * rows * self.context * config.num_hidden_layers * config.num_key_value_heads * config.head_size
        ) * weight.element_size()
        self.rows, self._max_waiting = rows, max_waiting
        self.stats = EngineStats()
        join_projections(model)  # it is the engine's own
        self._decoder = Decoder(LocalModel(model), tokenizer, DecoderSize(rows, self.context), on_failure=self._fail)
        self._lock, self._jobs = threading.Lock(), dict[int, _Job]()
        # Requests that belong together, and the numbers of those to cancel.
        self._orders: queue.SimpleQueue[list[GenerationRequest] | int] = queue.SimpleQueue()
        self._groups: deque[deque[GenerationRequest]] = deque()  # that wait; only the thread has them
        self._next, self._stopped = 0, threading.Event()
        self._thread = threading.Thread(target=on_current_device(self._run), name="engine", daemon=True)

    def __enter__(self) -> ServingEngine:
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

    def submit(self, requests: Sequence[GenerationRequest], receive: Receive) -> list[int]:
        """Start to generate all of them; their numbers, for ``cancel``, are those that pieces name.

        They count as at most one per row of the engine, so that a large request shuts nobody out: rows go to all
        groups in turn. Raises ``BusyError`` if too many wait already.
        """
        most = REQUEST_CAPACITY * (self.rows + self._max_waiting)
        if len(requests) > most:
            raise TooManyAnswersError(
                f"it asks for {len(requests)} answers, and this server takes up to {most} at once"
            )
        with self._lock:
            sizes = Counter(job.group for job in self._jobs.values())
            taken = sum(min(size, self.rows) for size in sizes.values())
            if taken and taken + min(len(requests), self.rows) > self._max_waiting + self.rows:
                self.stats.refused += 1
                raise BusyError(f"{len(self._jobs)} answers are generated or wait: try again later")
            numbers = list(range(self._next, self._next + len(requests)))
            self._next += len(requests)
            self._jobs |= {number: _Job(receive, numbers[0], time.monotonic()) for number in numbers}
            self.stats.requests += len(requests)
            self.stats.prompt_tokens += sum(len(request.prompt_tokens) for request in requests)
        self._orders.put([replace(request, index=number) for number, request in zip(numbers, requests, strict=True)])
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
            self._fill_rows()
            if self._decoder.finished:
                continue
            begin = time.monotonic()
            try:
                pieces = self._decoder.step()
            except Exception as error:  # of the model: the server must go on answering
                warn(f"generation failed: {type(error).__name__}: {error}")
                self._fail_all(_reason(error))
                continue
            self.stats.steps += 1
            self.stats.busy_seconds += time.monotonic() - begin
            for piece in pieces:
                self._deliver(piece)

    def _take_orders(self) -> None:
        """All that were given; waits for one if there is nothing to do."""
        wait = self._decoder.finished and not self._groups
        while True:
            try:
                order = self._orders.get(timeout=IDLE_SECONDS) if wait else self._orders.get_nowait()
            except queue.Empty:
                return
            wait = False
            if isinstance(order, list):
                self._groups.append(deque(order))
            else:
                self._decoder.remove(order)

    def _fill_rows(self) -> None:
        """One request of each group in turn."""
        while self._groups and self._decoder.active + self._decoder.waiting < self.rows:
            group = self._groups.popleft()
            request = group.popleft()
            if group:
                self._groups.append(group)
            with self._lock:
                is_wanted = request.index in self._jobs  # not cancelled
            if is_wanted:
                self._decoder.add(request)

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

    def _fail(self, number: int, error: Exception) -> None:
        """One request alone; the decoder has removed it."""
        warn(f"an answer failed: {type(error).__name__}: {error}")
        with self._lock:
            job = self._jobs.pop(number, None)
            self.stats.failed += job is not None
        if job is not None:
            job.receive(Failure(number, _reason(error)))

    def _fail_all(self, reason: str) -> None:
        """After an error nothing is known of the rows, so none of them is used again."""
        with self._lock:
            jobs, self._jobs = self._jobs, {}
            self.stats.failed += len(jobs)
        self._decoder.clear()
        self._groups.clear()
        for number, job in jobs.items():
            job.receive(Failure(number, reason))


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, Z2aError) else type(error).__name__


def metrics_text(engine: ServingEngine) -> str:
    """``/metrics`` of a server, in Prometheus' text format."""
    stats, times = engine.stats, sorted(engine.stats.first_token_seconds)
    counters: dict[str, tuple[str, float]] = {
        "requests": ("Requests.", stats.requests),
        "requests_completed": ("Requests that were answered.", stats.completed),
        "requests_cancelled": ("Requests whose client went away, or that took too long.", stats.cancelled),
        "requests_failed": ("Requests that failed in the model.", stats.failed),
        "requests_refused": ("Requests refused because the queue was full.", stats.refused),
        "prompt_tokens": ("Tokens of prompts.", stats.prompt_tokens),
        "generated_tokens": ("Tokens of complete answers.", stats.generated_tokens),
        "steps": ("Forward passes.", stats.steps),
        "busy_seconds": ("Time in forward passes.", stats.busy_seconds),
    }
    gauges = {
        "slots": ("Requests that are generated at the same time, at most.", engine.rows),
        "slots_used": ("Requests that are being generated.", engine.active),
        "requests_waiting": ("Requests in the queue.", max(0, engine.waiting)),
    }
    families = [(f"{name}_total", "counter", *rest) for name, rest in counters.items()]
    families += [(name, "gauge", *rest) for name, rest in gauges.items()]
    text = "".join(
        family_text(PREFIX + name, kind, help_text, [({}, value)]) for name, kind, help_text, value in families
    )
    newest = [
        ({"quantile": str(quantile)}, times[min(len(times) - 1, int(quantile * len(times)))])
        for quantile in (QUANTILES if times else ())
    ]
    return text + family_text(
        f"{PREFIX}first_token_seconds", "gauge", "Time to the first token, of the newest requests.", newest
    )
