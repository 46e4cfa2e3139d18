"""``z2a corpus generate``: new instructions and answers by a model behind an OpenAI-compatible endpoint.

As in self-instruct (https://arxiv.org/abs/2212.10560): a few seed tasks are shown, the model writes another, and then
answers it. Lines that are written stay, so that an interrupted call resumes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.base.console import progress
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.network.http_client import UnansweredError
from zero2all.base.network.openai_client import Endpoint
from zero2all.base.redact import redact
from zero2all.corpus.chat_shapes import find_example

EXAMPLES = 4
MAX_SIMILARITY = 0.7  # of the n-grams of two instructions
NGRAM = 4  # characters: serves Chinese and English
ASK_FOR_TASK = (
    "Here are tasks that somebody gave an assistant. Write one more task of another kind, in the language of these, "
    "without an answer and without a number before it.\n\n{examples}"
)


@dataclass(frozen=True)
class GenerateOptions:
    """How new conversations are made."""

    endpoint: str
    """The URL of an API, such as ``http://127.0.0.1:8000/v1``."""
    model: str
    count: int
    max_tokens: int = 512
    temperature: float = 0.9
    workers: int = 4
    timeout: float = 120.0
    seed: int = 0


@dataclass(frozen=True)
class GeneratedConversations:
    written: int
    """The number that this call wrote."""
    total: int
    too_similar: int
    failed: int


def generate_conversations(seeds: Path, out: Path, options: GenerateOptions) -> GeneratedConversations:
    """Append to ``out`` until it has ``count`` conversations. One that is similar to a seed or another is dropped."""
    client = _Client(options)
    instructions = _read_instructions(seeds)
    if len(instructions) < EXAMPLES:
        raise UsageError(f"{seeds} has {len(instructions)} instructions; at least {EXAMPLES} are needed as examples")
    before = _read_instructions(out) if out.exists() else []
    known = [_ngrams(text) for text in (*instructions, *before)]
    written = similar = failed = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(out, "a", encoding="utf-8") as file,
        ThreadPoolExecutor(options.workers) as pool,
        progress(f"generating {out.name}", options.count) as advance,
    ):
        advance(len(before))
        for attempt in _rounds(len(before), options.count):
            if len(before) + written >= options.count:
                break
            numbers = range(attempt * options.workers, (attempt + 1) * options.workers)
            for made in pool.map(lambda number: _make(client, instructions, number), numbers):
                if made is None:
                    failed += 1
                elif _is_similar(own := _ngrams(made[0]), known):
                    similar += 1
                elif len(before) + written < options.count:
                    known.append(own)
                    messages = [{"role": "user", "content": made[0]}, {"role": "assistant", "content": made[1]}]
                    file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
                    file.flush()
                    written += 1
                    advance(1)
    if not written and len(before) < options.count:
        raise Z2aError(
            f"nothing new came from {redact(options.endpoint)}: {similar} too similar, {failed} without an answer"
            + (f"; the last error: {client.last_error}" if client.last_error else "")
        )
    return GeneratedConversations(written, len(before) + written, similar, failed)


def _rounds(done: int, count: int) -> Iterator[int]:
    """Numbers of rounds; random numbers of a resumed call differ from those before. It ends although nothing is new."""
    yield from range(done, done + 10 * (count - done) + 10)


def _read_instructions(path: Path) -> list[str]:
    """The first question of every conversation."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            messages = find_example(json.loads(line)).example.conversation.messages
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}, line {number}: {error}") from error
        found.append(next(message.content for message in messages if message.role == "user"))
    return found


def _make(client: _Client, instructions: Sequence[str], number: int) -> tuple[str, str] | None:
    """A task and its answer, or None if the endpoint gave none."""
    rng = random.Random(f"{client.options.seed}/{number}")
    examples = "\n\n".join(f"- {text}" for text in rng.sample(list(instructions), EXAMPLES))
    task = client.ask(ASK_FOR_TASK.format(examples=examples), number)
    if not task:
        return None
    answer = client.ask(task, number)
    return (task, answer) if answer else None


class _Client:
    def __init__(self, options: GenerateOptions) -> None:
        self.options, self._endpoint = options, Endpoint(options.endpoint, options.timeout)
        self.last_error = ""

    def ask(self, text: str, number: int) -> str:
        """The answer to one message; empty if there is none after all retries."""
        body: dict[str, Any] = {
            "model": self.options.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.options.max_tokens,
            "temperature": self.options.temperature,
            "seed": self.options.seed + number,
        }
        try:
            return _reply_text(self._endpoint.post("chat/completions", body))
        except (UnansweredError, ValueError) as error:
            self.last_error = str(error)[:300]
            return ""


def _reply_text(value: Any) -> str:
    try:
        text = value["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError("the reply has no message") from error
    return text.strip() if isinstance(text, str) else ""


def _ngrams(text: str) -> frozenset[str]:
    plain = "".join(text.lower().split())
    return frozenset(plain[place : place + NGRAM] for place in range(max(1, len(plain) - NGRAM + 1)))


def _is_similar(own: frozenset[str], known: Sequence[frozenset[str]]) -> bool:
    return any(len(own & other) > MAX_SIMILARITY * min(len(own), len(other)) for other in known)
