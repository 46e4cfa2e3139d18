"""The dashboard server: one local page that follows the given runs live.

A browser cannot choose a path: runs are numbered, and the files of a run have fixed names. The server binds to loopback
by default, and every API request needs the key in the page's address. ``/metrics`` is for Prometheus.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from zero2all.errors import Z2aError
from zero2all.findings import Finding, PageFinding, page_finding
from zero2all.track.eval_record import EvalCurve
from zero2all.track.experiment_record import find_experiments
from zero2all.track.health_checks import check_health
from zero2all.track.http_server import HEADERS, bearer_token
from zero2all.track.prometheus import CONTENT_TYPE, RunSeries, exposition, run_series, unreadable_run
from zero2all.track.record_lines import EventLine, LoggedLine, RecordLine, line_to_json, restart_step
from zero2all.track.record_reader import Array, MetricTable
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunStatus, RunView, error_message
from zero2all.track.ssh import UnreachableError

PAGE_DIR = Path(__file__).with_name("page")
MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".txt": "text/plain"}
REFRESH_SECONDS = 0.5  # between two refreshes of a run
HEALTH_CHECK_SECONDS = 5.0
UNCHANGED_CHECK_SECONDS = 60.0  # between two health checks of a run that has written nothing: time alone can be a sign
CHECK_SHARE = 0.1  # of one core, for the health checks of all runs
QUIET_SECONDS = 30.0  # without a change, after which a run counts as quiet
QUIET_REFRESHES_PER_SECOND = 100  # of all quiet runs together
READERS = 2  # threads that read runs, so that many runs do not take the threads of requests
OPENING_SECONDS = 1.0  # for which the page waits at the start; what has not been read by then is shown a little later
DISCOVERY_SECONDS = 5.0  # between two searches for runs that have begun since
KEEPALIVE_SECONDS = 10.0
# (run directory, step, whether to recompute losses) -> the JSON of 'z2a blame', with losses or without
DocumentLookup = Callable[[Path, int, bool], object]
RunSearch = Callable[[], list[RunView]]


@dataclass(frozen=True)
class RunSummary:
    """Everything that the page needs of a run except the series."""

    names: list[str]
    status: RunStatus
    events: list[EventLine]
    samples: dict[str, list[int]]
    """Steps by name."""
    histograms: dict[str, list[int]]
    verdicts: list[PageFinding]
    batch_tokens: int | None
    directory: str | None
    evals: list[EvalCurve]


@dataclass(frozen=True)
class RunUpdate:
    """What changed in a run since the page was last told."""

    names: list[str]
    status: RunStatus
    verdicts: list[PageFinding]
    ranks: bool
    """Whether there are records of several ranks."""
    lines: list[RecordLine]
    reload: bool
    """Whether the page must load everything again."""
    evals: list[EvalCurve] | None
    """None if they are those that the page has."""


@dataclass(frozen=True)
class SeriesBlock:
    """Columns of metrics over the same rows; ``low`` and ``high`` if downsampled."""

    steps: list[float | None]
    times: list[float | None]
    tokens: list[float] | None
    mean: dict[str, list[float | None]] | None
    low: dict[str, list[float | None]] | None
    high: dict[str, list[float | None]] | None


class CheckBudget:
    """Limits the health checks of all runs together to a share of one core."""

    def __init__(self) -> None:
        self._lock, self._next = threading.Lock(), -math.inf

    def take(self) -> AbstractContextManager[None] | None:
        """A context for one check, whose time counts; None if the budget is used up for now."""
        with self._lock:
            if time.monotonic() < self._next:
                return None
            self._next = math.inf  # one at a time
        return self._spend()

    @contextmanager
    def _spend(self) -> Iterator[None]:
        begun = time.thread_time()
        try:
            yield
        finally:
            self._next = time.monotonic() + (time.thread_time() - begun) / CHECK_SHARE


class LiveRun:
    """A run, refreshed by one task and read by many requests."""

    def __init__(self, run: RunView, read: bool = True, budget: CheckBudget | None = None) -> None:
        """With ``read`` False, the first refresh reads it. ``budget`` is shared by all runs of a page."""
        self._budget = budget or CheckBudget()
        self.run, self.lock, self.version = run, threading.Lock(), 0
        self._findings: list[Finding] = []
        self._last_health_check, self._failed = -math.inf, False
        self._changed_since_check, self._last_change = True, time.monotonic()
        self._summary: RunSummary | None = None
        if read:
            self.refresh()

    @property
    def summary(self) -> RunSummary:
        """An empty one for a run that has never been read."""
        return self._summary or RunSummary([], RunStatus(self.run.name), [], {}, {}, [], None, None, [])

    def refresh_interval(self, runs: int) -> float:
        """Seconds until the next refresh of one of ``runs`` runs."""
        is_quiet = time.monotonic() - self._last_change > QUIET_SECONDS
        return max(REFRESH_SECONDS, runs / QUIET_REFRESHES_PER_SECOND) if is_quiet else REFRESH_SECONDS

    def refresh(self) -> None:
        """Never raises: a failure is shown for this run, and the others are followed as before."""
        with self.lock:
            changed, failed = self.run.refresh(), self._failed
            try:
                self._update_summary(changed or failed)
                self._failed = False
            except Exception as error:
                self._failed, message = True, error_message(error)
                if not failed or self.summary.status.trouble != message:
                    self._summary = replace(self.summary, status=replace(self.summary.status, trouble=message))
                    self.version += 1

    def series(self) -> RunSeries:
        """What ``/metrics`` has of this run."""
        with self.lock:
            try:
                return run_series(self.run, self.summary.status, self._findings)
            except Exception:  # the other runs are still exported
                return unreadable_run(self.run.name)

    def _update_summary(self, changed: bool) -> None:
        if changed:
            self._changed_since_check, self._last_change = True, time.monotonic()
        finished = self.run.ended is not None and not changed and self._summary is not None
        due = HEALTH_CHECK_SECONDS if self._changed_since_check else max(UNCHANGED_CHECK_SECONDS, HEALTH_CHECK_SECONDS)
        is_due = not finished and time.monotonic() - self._last_health_check > due
        if is_due and (check := self._budget.take()) is not None:
            with check:
                before, self._findings = self._findings, check_health(self.run)
            self._last_health_check, self._changed_since_check = time.monotonic(), False
            changed = changed or before != self._findings
        if changed or self._summary is None:
            self._summary = summarize_run(self.run, self._findings)
            self.version += 1


class DashboardHandlers:
    """Request handlers of the page and its API."""

    def __init__(self, runs: list[LiveRun], key: str, documents: DocumentLookup | None) -> None:
        self.runs, self._key, self._documents = runs, key, documents
        self._assets = {path.name: path for path in PAGE_DIR.iterdir() if path.suffix in MEDIA_TYPES}
        self._documents_semaphore = asyncio.Semaphore(1)  # recomputing losses loads a model: one at a time

    def page(self, request: Request) -> Response:
        return self._asset("index.html")

    def asset(self, request: Request) -> Response:
        return self._asset(request.path_params["name"])

    def _asset(self, name: str) -> Response:
        if name not in self._assets:
            raise HTTPException(404)
        path = self._assets[name]
        return Response(path.read_bytes(), media_type=MEDIA_TYPES[path.suffix], headers=HEADERS)

    def list_runs(self, request: Request) -> Response:
        self._check(request)
        return json_response([{"id": number, **vars(live_run.summary)} for number, live_run in enumerate(self.runs)])

    def experiments(self, request: Request) -> Response:
        self._check(request)
        return json_response(find_experiments([live_run.run.location for live_run in self.runs]))

    def series(self, request: Request) -> Response:
        live_run, query = self._find_run(request), request.query_params
        points = _integer(query.get("points", "1500"), minimum=1)
        first, last = _number(query.get("from"), -math.inf), _number(query.get("to"), math.inf)
        with live_run.lock:
            names = [name for name in query.getlist("name") if name in set(live_run.run.names)]
            return json_response(build_series(live_run.run, names, first, last, min(points, 20_000)))

    def logged_text(self, request: Request) -> Response:
        live_run, query = self._find_run(request), request.query_params
        logged = LoggedLine(query.get("kind", "sample"), query.get("name", ""), _integer(query.get("step", "")))
        with live_run.lock:
            line = live_run.run.logged_line(logged)
        if line is None:
            raise HTTPException(404)
        return json_response(line)

    def metadata(self, request: Request) -> Response:
        run = self._find_run(request).run
        return json_response({"recipe": run.metadata.recipe, "environment": run.metadata.environment})

    async def documents(self, request: Request) -> Response:
        run, step = self._find_run(request).run, _integer(request.query_params.get("step", ""))
        losses = request.query_params.get("losses") == "1"
        details = {key: value for event in run.events if event.step == step for key, value in event.details.items()}
        recorded = {key: details[key] for key in ("documents", "layer_norms") if details.get(key)}
        has_losses = any(isinstance(one, dict) and "loss" in one for one in recorded.get("documents", ()))
        is_local = self._documents is not None and isinstance(run.location, LocalRunLocation)
        if "documents" in recorded and not losses and (has_losses or not is_local):
            return json_response(recorded)
        if self._documents is None or not isinstance(run.location, LocalRunLocation):
            return json_response({"elsewhere": f"z2a blame RUN --step {step}"})
        async with self._documents_semaphore:
            try:
                found = await run_in_threadpool(self._documents, run.location.directory, step, losses)
            except Z2aError as error:
                is_enough = "documents" in recorded and not losses
                return json_response(recorded if is_enough else {"error": str(error)})
        return json_response({**recorded, **found} if isinstance(found, dict) else found)

    def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        self._check(request)
        runs = [live_run.series() for live_run in list(self.runs)]
        return Response(exposition(runs), media_type=CONTENT_TYPE, headers=HEADERS)

    def event_stream(self, request: Request) -> Response:
        self._check(request)
        return StreamingResponse(self._event_messages(), media_type="text/event-stream", headers=HEADERS)

    async def _event_messages(self) -> AsyncIterator[str]:
        """Server-sent events: the updates of each run that this page has not seen."""
        seen = [_seen(live_run) for live_run in self.runs]
        last_message = time.monotonic()
        yield ": hello\n\n"
        while True:
            if len(self.runs) > len(seen):
                seen += [_seen(live_run) for live_run in self.runs[len(seen) :]]
                yield f"data: {encode_json({'found': len(seen)})}\n\n"
            for number, live_run in enumerate(self.runs[: len(seen)]):
                if live_run.version != seen[number].version:
                    update, seen[number] = _update_since(live_run, seen[number])
                    last_message = time.monotonic()
                    yield f"data: {encode_json({'id': number, **vars(update)})}\n\n"
            if time.monotonic() - last_message > KEEPALIVE_SECONDS:  # a write detects a closed page
                last_message = time.monotonic()
                yield ": still here\n\n"
            await asyncio.sleep(REFRESH_SECONDS / 2)

    def _find_run(self, request: Request) -> LiveRun:
        self._check(request)
        number: int = request.path_params["run"]
        if number >= len(self.runs):
            raise HTTPException(404)
        return self.runs[number]

    def _check(self, request: Request) -> None:
        """The key is in the address, as for the page, or in the header ``Authorization: Bearer KEY``."""
        given = [request.query_params.get("key", ""), bearer_token(request)]
        if not any(hmac.compare_digest(key.encode(), self._key.encode()) for key in given):
            raise HTTPException(403, "the address of the page ends in a key; use the one that 'z2a watch' printed")


def build_app(
    runs: list[RunView], key: str, documents: DocumentLookup | None = None, search: RunSearch | None = None
) -> Starlette:
    """``search`` finds all runs again: those that have begun since are added."""
    opened_until = time.monotonic() + OPENING_SECONDS
    budget = CheckBudget()
    live_runs = [LiveRun(run, time.monotonic() < opened_until, budget) for run in runs]
    handlers = DashboardHandlers(live_runs, key, documents)

    @asynccontextmanager
    async def following(app: Starlette) -> AsyncIterator[None]:
        readers = ThreadPoolExecutor(READERS, thread_name_prefix="z2a-read")

        async def follow(live_run: LiveRun) -> None:
            while True:
                await asyncio.get_running_loop().run_in_executor(readers, live_run.refresh)
                await asyncio.sleep(live_run.refresh_interval(len(live_runs)))

        async def discover(search: RunSearch) -> None:
            while True:
                await asyncio.sleep(DISCOVERY_SECONDS)
                for live_run in await run_in_threadpool(_find_new, search, live_runs, budget):
                    live_runs.append(live_run)
                    tasks.append(asyncio.create_task(follow(live_run)))

        tasks = [asyncio.create_task(follow(live_run)) for live_run in live_runs]
        if search is not None:
            tasks.append(asyncio.create_task(discover(search)))
        yield
        for task in tasks:
            task.cancel()
        readers.shutdown(wait=False, cancel_futures=True)

    routes = [
        Route("/", handlers.page),
        Route("/assets/{name}", handlers.asset),
        Route("/api/runs", handlers.list_runs),
        Route("/api/experiments", handlers.experiments),
        Route("/api/runs/{run:int}/series", handlers.series),
        Route("/api/runs/{run:int}/text", handlers.logged_text),
        Route("/api/runs/{run:int}/facts", handlers.metadata),
        Route("/api/runs/{run:int}/documents", handlers.documents),
        Route("/api/stream", handlers.event_stream),
        Route("/metrics", handlers.metrics),
    ]
    app = Starlette(routes=routes, lifespan=following, exception_handlers={UnreachableError: _unreachable})
    app.add_middleware(GZipMiddleware, minimum_size=10_000)
    return app


def _find_new(search: RunSearch, known: list[LiveRun], budget: CheckBudget) -> list[LiveRun]:
    try:
        found = search()
    except Z2aError:  # nothing there at the moment
        return []
    places = {getattr(live_run.run.location, "directory", None) for live_run in known}
    return [LiveRun(run, False, budget) for run in found if getattr(run.location, "directory", None) not in places]


def _unreachable(request: Request, error: Exception) -> Response:
    return Response(str(error), status_code=503, headers=HEADERS)


def summarize_run(run: RunView, findings: list[Finding]) -> RunSummary:
    return RunSummary(
        names=run.names,
        status=run.status(),
        events=run.events,
        samples=run.logged_steps(),
        histograms=run.logged_steps("histogram"),
        verdicts=[page_finding(finding) for finding in findings],
        batch_tokens=run.metadata.batch_tokens,
        directory=str(run.location.directory) if isinstance(run.location, LocalRunLocation) else None,
        evals=run.eval_curves(),
    )


def build_series(run: RunView, names: list[str], first: float, last: float, points: int) -> list[SeriesBlock]:
    """One block of columns per rank, and one for each kind of evaluation: their rows need not align."""
    blocks = []
    for rank, reader in sorted(run.readers.items()):
        suffix = f"@{rank}" if rank else ""
        available_names = [
            name.removesuffix(suffix) for name in names if ("@" in name) == bool(rank) and name.endswith(suffix)
        ]
        available_names = [name for name in available_names if name in reader.names]
        if available_names:
            axis_names = ["tokens"] if "tokens" in reader.names and "tokens" not in available_names else []
            blocks.append(
                _series_block(
                    run, run.table([*available_names, *axis_names], first, last, points, rank), available_names, suffix
                )
            )
    for table in (run.validation_table(first, last), run.eval_table(first, last)):
        if available_names := [name for name in names if name in table.mean]:
            blocks.append(_series_block(run, table, available_names, ""))
    return blocks


def _series_block(run: RunView, table: MetricTable, names: list[str], suffix: str) -> SeriesBlock:
    return SeriesBlock(
        steps=_json_column(table.steps),
        times=_json_column(table.times),
        tokens=run.tokens_at(table),
        mean=_columns(table.mean, names, suffix),
        low=_columns(table.low, names, suffix),
        high=_columns(table.high, names, suffix),
    )


def _columns(columns: dict[str, Array] | None, names: list[str], suffix: str) -> dict[str, list[float | None]] | None:
    return None if columns is None else {name + suffix: _json_column(columns[name]) for name in names}


def _json_column(column: Array) -> list[float | None]:
    return [None if not math.isfinite(value) else value for value in column.tolist()]


class _Seen(NamedTuple):
    """What a page has of a run."""

    version: int
    sequence: int
    """Of the record."""
    evals: int
    """The version of the evaluations."""


def _seen(live_run: LiveRun) -> _Seen:
    return _Seen(live_run.version, live_run.run.readers[0].sequence, live_run.run.evals.version)


def _update_since(live_run: LiveRun, before: _Seen) -> tuple[RunUpdate, _Seen]:
    """What changed, and what the page has then."""
    with live_run.lock:
        lines = list(live_run.run.lines_after(before.sequence))
        now, has_ranks = _seen(live_run), len(live_run.run.readers) > 1
        summary = live_run.summary
    restarted = any(restart_step(line) is not None for _, line in lines)
    missed = now.sequence - before.sequence != len(lines)
    reload = restarted or (missed and bool(lines))
    new_lines = [line for _, line in lines]
    evals = None if now.evals == before.evals else summary.evals
    return RunUpdate(summary.names, summary.status, summary.verdicts, has_ranks, new_lines, reload, evals), now


def json_response(value: Any) -> Response:
    return Response(encode_json(value), media_type="application/json", headers=HEADERS)


def encode_json(value: Any) -> str:
    """JSON for browsers: NaN and infinities become null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_fields)
    except ValueError:
        return json.dumps(_replace_non_finite(value), ensure_ascii=False, allow_nan=False)


def _fields(value: Any) -> Any:
    """A dataclass as JSON, one level deep."""
    return line_to_json(value) if isinstance(value, RecordLine) else vars(value)


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value):
        value = _fields(value)
    if isinstance(value, dict):
        return {name: _replace_non_finite(inner) for name, inner in value.items()}
    return [_replace_non_finite(inner) for inner in value] if isinstance(value, list) else value


def _integer(text: str, minimum: int = 0) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 15 and int(text) >= minimum):
        raise HTTPException(400, f"{text[:40]!r} is not an integer from {minimum} on")
    return int(text)


def _number(text: str | None, default: float) -> float:
    try:
        return default if text is None else float(text)
    except ValueError:
        raise HTTPException(400, f"{text!r} is not a number") from None
