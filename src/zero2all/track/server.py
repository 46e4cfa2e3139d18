"""The dashboard server: one local page that follows the given runs live.

A browser cannot choose a path: runs are numbered, and the files of a run have fixed names. The server binds to loopback
by default, and every API request needs the key in the page's address. ``/metrics`` is for Prometheus.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from zero2all.base.errors import Z2aError
from zero2all.track.experiment_record import find_experiments
from zero2all.track.http_server import HEADERS, bearer_token
from zero2all.track.live_run import REFRESH_SECONDS, CheckBudget, LiveRun
from zero2all.track.page_data import PAGE_DIR, build_series, encode_json
from zero2all.track.prometheus import CONTENT_TYPE, exposition
from zero2all.track.record_lines import LoggedLine
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunView
from zero2all.track.ssh import UnreachableError

MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".txt": "text/plain"}
READERS = 2  # threads that read runs, so that many runs do not take the threads of requests
OPENING_SECONDS = 1.0  # for which the page waits at the start; what has not been read by then is shown a little later
DISCOVERY_SECONDS = 5.0  # between two searches for runs that have begun since
KEEPALIVE_SECONDS = 10.0
# (run directory, step, whether to recompute losses) -> the JSON of 'z2a blame', with losses or without
DocumentLookup = Callable[[Path, int, bool], object]
RunSearch = Callable[[], list[RunView]]


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
        """The metrics of all runs for Prometheus."""
        self._check(request)
        runs = [live_run.series() for live_run in list(self.runs)]
        return Response(exposition(runs), media_type=CONTENT_TYPE, headers=HEADERS)

    def event_stream(self, request: Request) -> Response:
        self._check(request)
        return StreamingResponse(self._event_messages(), media_type="text/event-stream", headers=HEADERS)

    async def _event_messages(self) -> AsyncIterator[str]:
        """Server-sent events: the updates of each run that this page has not seen."""
        seen = [live_run.seen() for live_run in self.runs]
        last_message = time.monotonic()
        yield ": hello\n\n"
        while True:
            if len(self.runs) > len(seen):
                seen += [live_run.seen() for live_run in self.runs[len(seen) :]]
                yield f"data: {encode_json({'found': len(seen)})}\n\n"
            for number, live_run in enumerate(self.runs[: len(seen)]):
                if live_run.version != seen[number].version:
                    update, seen[number] = live_run.update_since(seen[number])
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
    live_runs = [LiveRun(run, read=time.monotonic() < opened_until, budget=budget) for run in runs]
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
    return [
        LiveRun(run, read=False, budget=budget)
        for run in found
        if getattr(run.location, "directory", None) not in places
    ]


def _unreachable(request: Request, error: Exception) -> Response:
    return Response(str(error), status_code=503, headers=HEADERS)


def json_response(value: Any) -> Response:
    return Response(encode_json(value), media_type="application/json", headers=HEADERS)


def _integer(text: str, minimum: int = 0) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 15 and int(text) >= minimum):
        raise HTTPException(400, f"{text[:40]!r} is not an integer from {minimum} on")
    return int(text)


def _number(text: str | None, default: float) -> float:
    try:
        return default if text is None else float(text)
    except ValueError:
        raise HTTPException(400, f"{text!r} is not a number") from None
