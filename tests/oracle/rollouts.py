"""Fixed answers for GRPO: a server with the API that the product samples from, and a reward of each answer."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.oracle.reference import TransformersTokenizer

ANSWER = "the model says what comes next because small steps make long roads"


def reward(ids: Sequence[int]) -> float:
    """Of the tokens of an answer: by its length and content."""
    return (sum(ids) % 17) / 4 + len(ids) / 8


def reward_of_text(prompt: str, text: str, reference: str) -> float:
    """The reward function of the recipe. The server writes the tokens of an answer in its text."""
    return reward([int(word) for word in text.split()])


def sampler_logps(ids: Sequence[int]) -> list[float]:
    """As of a sampler that is not the trainer: some weights are cut at their maximum, others are not."""
    return [-6.0 + 2.0 * ((id * 7 + place) % 11) / 11 for place, id in enumerate(ids)]


@contextmanager
def serve_answers(tokenizer: TransformersTokenizer) -> Iterator[str]:
    """The URL of a server that answers a prompt always the same."""
    words = ANSWER.split()

    def choices(prompt: list[int], copies: int) -> list[dict[str, Any]]:
        rng = random.Random(json.dumps(prompt))
        found = []
        for _ in range(copies):
            text = " ".join(rng.choices(words, k=rng.randint(2, 7)))
            ids = [*tokenizer.text(text), tokenizer.turn_end]
            found.append({
                "text": " ".join(map(str, ids)), "token_ids": ids, "finish_reason": "stop",
                "logprobs": {"token_logprobs": sampler_logps(ids)},
            })  # fmt: skip
        return found

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = json.dumps({"choices": choices(body["prompt"], body["n"])}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing to the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
