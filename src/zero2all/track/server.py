"""resplot: one local page over the runs that it was given, following them as they grow.

The server holds no path that a browser could choose: runs have numbers, and files of a run fixed names. It binds to
loopback unless told otherwise, and data is given only to those who have the key in the page's address.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from zero2all.errors import Z2aError
from zero2all.track.lines import is_restart
from zero2all.track.places import LocalPlace
from zero2all.track.ssh import Unreachable
from zero2all.track.stream import Table
from zero2all.track.verdicts import Verdict, judge
from zero2all.track.watched import WatchedRun, reason

PAGE = Path(__file__).with_name("page")
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".txt": "text/plain"}
EVERY = 0.5  # seconds between two looks at a run
JUDGE_EVERY = 5.0
HEARTBEAT = 10.0
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
NOTHING_KNOWN: dict[str, Any] = {  # of a run that could not be looked at even once
    "names": [], "events": [], "samples": {}, "histograms": {}, "verdicts": [], "batch_tokens": None, "directory": None,
    "status": {"step": None, "steps": None, "time": None, "latest": {}, "step_seconds": None, "seconds_left": None,
               "goodput": None, "ended": None, "damage": []},
}  # fmt: skip
# (run directory, step, whether to recompute losses) -> what 'z2a tokens trace' or 'z2a blame' says
Documents = Callable[[Path, int, bool], dict[str, Any]]


class Followed:
    """A run, refreshed by one task and read by many requests."""

    def __init__(self, run: WatchedRun) -> None:
        self.run, self.lock, self.version = run, threading.Lock(), 0
        self._verdicts: list[Verdict] = []
        self._judged, self._failed = -math.inf, False
        self.summary: dict[str, Any] = {}
        self.refresh()

    def refresh(self) -> None:
        """Never raises: what goes wrong with one run is its trouble, and the others are followed as before."""
        with self.lock:
            changed, failed = self.run.refresh(), self._failed
            try:
                self._look(changed or failed)
                self._failed = False
            except Exception as error:
                self._failed, trouble = True, reason(error)
                if not failed or self.summary["status"]["trouble"] != trouble:
                    known = self.summary or {
                        **NOTHING_KNOWN,
                        "status": {**NOTHING_KNOWN["status"], "name": self.run.name},
                    }
                    self.summary = {**known, "status": {**known["status"], "trouble": trouble}}
                    self.version += 1

    def _look(self, changed: bool) -> None:
        over = self.run.ended is not None and not changed and bool(self.summary)
        if not over and time.monotonic() - self._judged > JUDGE_EVERY:
            before, self._verdicts = self._verdicts, judge(self.run)
            self._judged = time.monotonic()
            changed = changed or before != self._verdicts
        if changed or not self.summary:
            self.summary = summary(self.run, self._verdicts)
            self.version += 1


class Pages:
    """The requests that the page makes."""

    def __init__(self, runs: list[Followed], key: str, documents: Documents | None) -> None:
        self.runs, self._key, self._documents = runs, key, documents
        self._assets = {path.name: path for path in PAGE.iterdir() if path.suffix in TYPES}
        self._one_at_a_time = asyncio.Semaphore(1)  # losses are recomputed with a model: never several at once

    def page(self, request: Request) -> Response:
        return self._asset("index.html")

    def asset(self, request: Request) -> Response:
        return self._asset(request.path_params["name"])

    def _asset(self, name: str) -> Response:
        if name not in self._assets:
            raise HTTPException(404)
        path = self._assets[name]
        return Response(path.read_bytes(), media_type=TYPES[path.suffix], headers=HEADERS)

    def list_runs(self, request: Request) -> Response:
        self._check(request)
        return answer([{"id": number, **followed.summary} for number, followed in enumerate(self.runs)])

    def series(self, request: Request) -> Response:
        followed, asked = self._run(request), request.query_params
        points = _integer(asked.get("points", "1500"), least=1)
        first, last = _number(asked.get("from"), -math.inf), _number(asked.get("to"), math.inf)
        with followed.lock:
            names = [name for name in asked.getlist("name") if name in set(followed.run.names)]
            return answer(series(followed.run, names, first, last, min(points, 20_000)))

    def text(self, request: Request) -> Response:
        followed, asked = self._run(request), request.query_params
        kind = asked.get("kind", "sample")
        with followed.lock:
            found = followed.run.text(kind, asked.get("name", ""), _integer(asked.get("step", "")))
        if found is None:
            raise HTTPException(404)
        return answer(found)

    def facts(self, request: Request) -> Response:
        run = self._run(request).run
        return answer({"recipe": run.facts.recipe, "environment": run.facts.environment})

    async def documents(self, request: Request) -> Response:
        run, step = self._run(request).run, _integer(request.query_params.get("step", ""))
        losses = request.query_params.get("losses") == "1"
        recorded = [event for event in run.events if event.get("step") == step and event.get("documents")]
        if recorded and not losses:
            return answer({"documents": recorded[-1]["documents"]})
        if self._documents is None or not isinstance(run.place, LocalPlace):
            return answer({"elsewhere": f"z2a blame RUN --step {step}"})
        async with self._one_at_a_time:
            try:
                return answer(await run_in_threadpool(self._documents, run.place.directory, step, losses))
            except Z2aError as error:
                return answer({"error": str(error)})

    def stream(self, request: Request) -> Response:
        self._check(request)
        return StreamingResponse(self._news(), media_type="text/event-stream", headers=HEADERS)

    async def _news(self) -> AsyncIterator[str]:
        """What each run has that this page has not seen, whenever there is something."""
        seen = [(followed.version, followed.run.streams[0].sequence) for followed in self.runs]
        quiet_since = time.monotonic()
        yield ": hello\n\n"
        while True:
            for number, followed in enumerate(self.runs):
                if followed.version != seen[number][0]:
                    news, sequence = _news_of(followed, seen[number][1])
                    seen[number] = (followed.version, sequence)
                    quiet_since = time.monotonic()
                    yield f"data: {encode({'id': number, **news})}\n\n"
            if time.monotonic() - quiet_since > HEARTBEAT:  # writing is how a page that went away is noticed
                quiet_since = time.monotonic()
                yield ": still here\n\n"
            await asyncio.sleep(EVERY / 2)

    def _run(self, request: Request) -> Followed:
        self._check(request)
        number: int = request.path_params["run"]
        if number >= len(self.runs):
            raise HTTPException(404)
        return self.runs[number]

    def _check(self, request: Request) -> None:
        if not secrets.compare_digest(request.query_params.get("key", "").encode(), self._key.encode()):
            raise HTTPException(403, "the address of the page ends in a key; use the one that 'z2a watch' printed")


def build_app(runs: list[WatchedRun], key: str, documents: Documents | None = None) -> Starlette:
    followed = [Followed(run) for run in runs]
    pages = Pages(followed, key, documents)

    @asynccontextmanager
    async def following(app: Starlette) -> AsyncIterator[None]:
        async def follow(one: Followed) -> None:
            while True:
                await run_in_threadpool(one.refresh)
                await asyncio.sleep(EVERY)

        tasks = [asyncio.create_task(follow(one)) for one in followed]
        yield
        for task in tasks:
            task.cancel()

    routes = [
        Route("/", pages.page),
        Route("/assets/{name}", pages.asset),
        Route("/api/runs", pages.list_runs),
        Route("/api/runs/{run:int}/series", pages.series),
        Route("/api/runs/{run:int}/text", pages.text),
        Route("/api/runs/{run:int}/facts", pages.facts),
        Route("/api/runs/{run:int}/documents", pages.documents),
        Route("/api/stream", pages.stream),
    ]
    app = Starlette(routes=routes, lifespan=following, exception_handlers={Unreachable: _unreachable})
    app.add_middleware(GZipMiddleware, minimum_size=10_000)
    return app


def _unreachable(request: Request, error: Exception) -> Response:
    return Response(str(error), status_code=503, headers=HEADERS)


def serve(app: Starlette, host: str, port: int, ready: Callable[[int], None]) -> None:
    """Until Ctrl-C. ``ready`` is told the port as soon as the page can be opened."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            raise Z2aError(f"cannot listen on {host}:{port} ({error}); choose another --port") from error
        listening.listen()
        ready(listening.getsockname()[1])
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        uvicorn.Server(config).run([listening])


def summary(run: WatchedRun, verdicts: list[Verdict]) -> dict[str, Any]:
    """All that a page needs to know of a run but the series themselves."""
    return {
        "names": run.names,
        "status": run.status(),
        "events": run.events,
        "samples": run.samples(),
        "histograms": run.samples("histogram"),
        "verdicts": [verdict.as_dict() for verdict in verdicts],
        "batch_tokens": run.facts.batch_tokens,
        "directory": str(run.place.directory) if isinstance(run.place, LocalPlace) else None,
    }


def series(run: WatchedRun, names: list[str], first: float, last: float, points: int) -> list[dict[str, Any]]:
    """A block of columns a rank, and one of the evaluations: their rows need not fit each other."""
    blocks = []
    for rank, stream in sorted(run.streams.items()):
        suffix = f"@{rank}" if rank else ""
        own = [name.removesuffix(suffix) for name in names if ("@" in name) == bool(rank) and name.endswith(suffix)]
        own = [name for name in own if name in stream.names]
        if own:
            helpful = ["tokens"] if "tokens" in stream.names and "tokens" not in own else []
            blocks.append(_block(run, run.table([*own, *helpful], first, last, points, rank), own, suffix))
    held_out = run.held_out(first, last)
    own = [name for name in names if name in held_out.mean]
    return [*blocks, _block(run, held_out, own, "")] if own else blocks


def _block(run: WatchedRun, table: Table, names: list[str], suffix: str) -> dict[str, Any]:
    return {
        "steps": _plain(table.steps),
        "times": _plain(table.times),
        "tokens": run.tokens_at(table),
        "mean": _columns(table, "mean", names, suffix),
        "low": _columns(table, "low", names, suffix),
        "high": _columns(table, "high", names, suffix),
    }


def _columns(table: Table, which: str, names: list[str], suffix: str) -> dict[str, Any] | None:
    columns = getattr(table, which)
    return None if columns is None else {name + suffix: _plain(columns[name]) for name in names}


def _plain(column: Any) -> list[float | None]:
    return [None if not math.isfinite(value) else value for value in column.tolist()]


def _news_of(followed: Followed, sequence: int) -> tuple[dict[str, Any], int]:
    """What a page adds to what it has: the lines since ``sequence``, or the word to ask for everything again."""
    with followed.lock:
        lines = list(followed.run.lines_after(sequence))
        latest, several = followed.run.streams[0].sequence, len(followed.run.streams) > 1
    restarted = any(is_restart(line) for _, line in lines)
    missed = latest - sequence != len(lines)
    kept = {name: followed.summary[name] for name in ("names", "status", "verdicts")}
    reload = restarted or (missed and bool(lines))
    return {**kept, "ranks": several, "lines": [line for _, line in lines], "reload": reload}, latest


def answer(value: Any) -> Response:
    return Response(encode(value), media_type="application/json", headers=HEADERS)


def encode(value: Any) -> str:
    """JSON that every browser reads: what is not finite is null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list) else value


def _integer(text: str, least: int = 0) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 15 and int(text) >= least):
        raise HTTPException(400, f"{text[:40]!r} is not an integer from {least} on")
    return int(text)


def _number(text: str | None, default: float) -> float:
    try:
        return default if text is None else float(text)
    except ValueError:
        raise HTTPException(400, f"{text!r} is not a number") from None
