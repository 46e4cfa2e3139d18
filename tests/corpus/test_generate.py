"""New conversations through a real HTTP server: what is kept, dropped, retried, resumed and refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.builds import write_lines
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.network.openai_client import API_KEY
from zero2all.corpus.generate import GenerateOptions, generate_conversations

WORDS = ("river", "engine", "violin", "harvest", "window", "star", "bread", "winter", "ladder", "sea", "wood", "lamp")


class Endpoint:
    """An OpenAI-compatible server: writes a task about other words each time, and answers it."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.statuses: list[int] = []
        """Answered first, instead of a reply."""
        self.same_task = False
        self.url = ""
        self._lock = threading.Lock()

    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        asked = request["messages"][-1]["content"]
        with self._lock:
            number = len(self.requests)
        if not asked.startswith("Here are tasks"):
            return {"choices": [{"message": {"content": f"An answer about {asked}"}}]}
        first, second, third = (WORDS[(number * step + number // 12) % 12] for step in (1, 5, 7))
        task = "the river." if self.same_task else f"{first} to {second} number {number} {third}"
        return {"choices": [{"message": {"content": f"Explain {task}"}}]}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    served = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.keys.append(self.headers.get("Authorization"))
            if served.statuses:
                self.send_response(served.statuses.pop(0))
                self.end_headers()
                return
            data = json.dumps(served.reply(request)).encode()
            served.requests.append(request)
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield served
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("zero2all.base.network.http_client.FIRST_WAIT", 0.01)
    monkeypatch.setattr("zero2all.base.network.openai_client.BUSY_SECONDS", 0.01)
    tasks = ("Add two numbers.", "Write a poem about the sea.", "翻译这句话。", "Name three birds.", "Sort words.")
    return write_lines(tmp_path / "seeds.jsonl", ({"instruction": task, "output": "ok"} for task in tasks))


def options(endpoint: Endpoint, count: int, **more: Any) -> GenerateOptions:
    return GenerateOptions(endpoint.url, "m", count, **more)


def test_new_conversations_are_appended_and_a_second_call_resumes(
    endpoint: Endpoint, seeds: Path, tmp_path: Path
) -> None:
    out = tmp_path / "more.jsonl"
    first = generate_conversations(seeds, out, options(endpoint, 3))
    assert (first.written, first.total) == (3, 3)
    before = out.read_text()
    second = generate_conversations(seeds, out, options(endpoint, 5))
    assert (second.written, second.total) == (2, 5)
    assert out.read_text().startswith(before)
    for line in out.read_text(encoding="utf-8").splitlines():
        question, answer = json.loads(line)["messages"]
        assert answer["content"] == f"An answer about {question['content']}"
    asked = len(endpoint.requests)
    assert generate_conversations(seeds, out, options(endpoint, 5)).written == 0
    assert len(endpoint.requests) == asked


def test_equal_instructions_are_dropped_and_it_ends(endpoint: Endpoint, seeds: Path, tmp_path: Path) -> None:
    endpoint.same_task = True
    made = generate_conversations(seeds, tmp_path / "out.jsonl", options(endpoint, 2, workers=2))
    assert made.written == 1
    assert made.too_similar > 5


def test_a_server_that_fails_is_asked_again(endpoint: Endpoint, seeds: Path, tmp_path: Path) -> None:
    endpoint.statuses = [500, 429, 503]
    made = generate_conversations(seeds, tmp_path / "out.jsonl", options(endpoint, 2, workers=1))
    assert made.written == 2


def test_a_wrong_key_ends_the_call_and_is_not_shown(
    endpoint: Endpoint, seeds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, "secret-key")
    endpoint.statuses = [401] * 8
    with pytest.raises(Z2aError, match="HTTP 401") as caught:
        generate_conversations(seeds, tmp_path / "out.jsonl", options(endpoint, 2))
    assert "secret-key" not in str(caught.value)
    assert endpoint.keys[0] == "Bearer secret-key"


def test_what_cannot_work_is_refused(seeds: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not an http"):
        generate_conversations(seeds, tmp_path / "out.jsonl", GenerateOptions("file:///etc/passwd", "m", 1))
    few = write_lines(tmp_path / "few.jsonl", [{"instruction": "a", "output": "b"}])
    nobody = GenerateOptions("http://127.0.0.1:1/v1", "m", 1, workers=1)
    with pytest.raises(UsageError, match="at least 4"):
        generate_conversations(few, tmp_path / "out.jsonl", nobody)
    with pytest.raises(Z2aError, match="nothing new came from"):
        generate_conversations(seeds, tmp_path / "out.jsonl", nobody)
