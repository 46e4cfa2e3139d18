"""Clients that leave their requests unfinished, at the usual limit of open files, keep nobody out."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

pytest.importorskip("uvicorn", reason="the server is not installed")
from zero2all.base.processes import raise_descriptor_limit

DESCRIPTORS, CONNECTIONS = 1024, 1200
SERVER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from zero2all.track.http_server import serve

async def page(request):
    return PlainTextResponse("a page" if request.method == "GET" else str(len(await request.body())))

async def large(request):
    return StreamingResponse(b"x" * 65536 for _ in range(1000))

routes = [Route("/", page, methods=["GET", "POST"]), Route("/large", large)]
serve(Starlette(routes=routes), "127.0.0.1", 0, lambda port: print(port, flush=True))
"""


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    command, log = [sys.executable, "-c", SERVER, str(DESCRIPTORS)], tmp_path_factory.mktemp("server") / "log"
    with (
        open(log, "w") as stream,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stream, text=True) as process,
    ):
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.terminate()
        process.wait(60)
    assert "Traceback" not in log.read_text()  # such as of accept() without descriptors, or of a client that goes away


def connect(port: int, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 30)
    connection.sendall(data)
    return connection


def ask(port: int, data: bytes = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") -> bytes:
    with connect(port, data) as connection:
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


UNFINISHED = {
    "heads": b"GET / HTTP/1.1\r\nHost: localhost\r\nX:",
    "nothing": b"",
    "bodies": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{",
    "a second head": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\nHost:",
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["heads", "bodies", "a second head", pytest.param("nothing", marks=pytest.mark.long)])
def test_a_request_is_answered_during_a_flood_of_unfinished_ones(port: int, kind: str) -> None:
    if raise_descriptor_limit() < CONNECTIONS + 200:
        pytest.skip(f"this process may open only {resource.getrlimit(resource.RLIMIT_NOFILE)[1]} files")
    with ExitStack() as stack:
        for _ in range(CONNECTIONS):
            stack.enter_context(connect(port, UNFINISHED[kind]))
        for _ in range(3):
            assert ask(port).endswith(
                b"a page"
            )  # a busy machine takes some of the 30 s; without a limit nobody answers


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["heads", "nothing", "a second head"])
def test_an_unfinished_request_is_dropped_after_seconds(port: int, kind: str) -> None:
    with connect(port, UNFINISHED[kind]) as connection:
        connection.settimeout(60)
        start = time.monotonic()
        try:
            while connection.recv(65536):
                pass
        except ConnectionResetError:
            pass
        assert time.monotonic() - start < 30


def test_a_request_in_parts_is_answered(port: int) -> None:
    with connect(port, b"POST / HTTP/1.1\r\nHost: localhost\r\nConn") as connection:
        for part in (b"ection: close\r\nContent-Length: 4\r\n", b"\r\n12", b"34"):
            time.sleep(0.05)  # so that they arrive apart
            connection.sendall(part)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.endswith(b"4")


def test_requests_in_a_row_on_one_connection_are_answered(port: int) -> None:
    with connect(port, b"") as connection:
        for _ in range(3):
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"a page"):
                answer += connection.recv(65536)
