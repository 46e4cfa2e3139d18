"""Real HTTP servers on loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from zero2all.generation.serve.api_answers import ServedModel
from zero2all.generation.serve.app import ServerLimits, build_api
from zero2all.generation.serve.engine import ServingEngine
from zero2all.track.http_server import server_config

KEY = "a key of the tests"


@dataclass(frozen=True)
class Served:
    url: str
    engine: ServingEngine
    model: ServedModel


@contextmanager
def serve(engine: ServingEngine, model: ServedModel, limits: ServerLimits | None = None) -> Iterator[Served]:
    app = build_api(engine, model, KEY, limits)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = uvicorn.Server(server_config(app))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, model)
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def wait_until_idle(engine: ServingEngine, seconds: float = 30.0) -> None:
    """Until no request is generated or waits."""
    deadline = time.monotonic() + seconds
    while engine.active or engine.waiting:
        assert time.monotonic() < deadline, (engine.active, engine.waiting)
        time.sleep(0.02)
