"""Answers in OpenAI's format."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zero2all.generation.decoder import TextPiece, TokenLogprobs
from zero2all.generation.sampling import overlap
from zero2all.generation.serve.api_requests import ApiRequest, ChatRequest, CompletionRequest
from zero2all.tokenizer import Tokenizer
from zero2all.tokenizer.vocabulary import TOOL_CALL, TOOL_CALL_END

Json = dict[str, Any]


@dataclass(frozen=True)
class AnswerToolCall:
    id: str
    name: str
    arguments: str
    """JSON."""


def parse_tool_calls(text: str) -> tuple[str, list[AnswerToolCall]]:
    """The text before the calls, and the calls. What is no valid call stays text."""
    content, *blocks = text.split(TOOL_CALL)
    calls = []
    for block in blocks:
        body, found, rest = block.partition(TOOL_CALL_END)
        call = _parse_call(body) if found else None
        if call is None:
            content += TOOL_CALL + block
        else:
            calls.append(call)
            content += rest if rest.strip() else ""
    return content, calls


def _parse_call(body: str) -> AnswerToolCall | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return AnswerToolCall(f"call_{secrets.token_hex(12)}", value["name"], json.dumps(arguments, ensure_ascii=False))


@dataclass(frozen=True)
class ServedModel:
    """What a server needs to know of a model besides its weights."""

    name: str
    tokenizer: Tokenizer
    begin_id: int | None
    """The token that a text begins with, as in training."""
    is_base: bool = False
    """Whether it was only pretrained: it continues text and has not learned to answer."""
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass
class Choice:
    """One answer to a request, as far as it was generated."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """When it is complete, with the token that ended it."""
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    sent: int = 0
    """Characters of the text that a stream has sent."""


@dataclass(frozen=True)
class AnswerHeader:
    """What every part of an answer repeats."""

    id: str
    model: str
    object: str
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: list[Json], usage: Json | None = None) -> Json:
        head = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **({} if usage is None else {"usage": usage})}


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class TokenTexts:
    """Tokens as text in reports of log-probabilities."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.token_bytes

    def text(self, token: int) -> str:
        """A part of a character is written as its bytes, so that different tokens are different texts."""
        data = self._bytes[token] if token < len(self._bytes) else b""
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def chat(self, logprobs: Sequence[TokenLogprobs]) -> Json:
        """``logprobs`` of ``/v1/chat/completions``."""
        return {
            "content": [
                {
                    **self._entry(one.token, one.logprob),
                    "top_logprobs": [self._entry(token, logprob) for token, logprob in one.top],
                }
                for one in logprobs
            ]
        }

    def _entry(self, token: int, logprob: float) -> Json:
        return {"token": self.text(token), "logprob": logprob, "bytes": list(self._bytes[token])}

    def completion(self, logprobs: Sequence[TokenLogprobs]) -> Json:
        """``logprobs`` of ``/v1/completions``."""
        return {
            "tokens": [self.text(one.token) for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [{self.text(token): logprob for token, logprob in one.top} for one in logprobs],
        }


def message(content: str, calls: Sequence[AnswerToolCall]) -> Json:
    found: Json = {"role": "assistant", "content": content or (None if calls else "")}
    if calls:
        found["tool_calls"] = tool_calls(calls)
    return found


def tool_calls(calls: Sequence[AnswerToolCall], *, numbered: bool = False) -> list[Json]:
    return [
        {
            **({"index": number} if numbered else {}),
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(calls)
    ]


def add_piece(choice: Choice, piece: TextPiece) -> None:
    choice.text += piece.text
    choice.logprobs += piece.logprobs
    if piece.completion is not None:
        choice.token_ids, choice.finish_reason = piece.completion.tokens, piece.completion.finish_reason


class Answer:
    """How the choices of a request become JSON: as a whole, or in parts."""

    kind, prefix = "", ""

    def __init__(self, served: ServedModel, texts: TokenTexts, body: ApiRequest, prompt_tokens: int) -> None:
        self._served, self._texts, self._prompt_tokens = served, texts, prompt_tokens
        self._wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._header = AnswerHeader(f"{self.prefix}-{secrets.token_hex(12)}", served.name, self.kind)

    def whole(self, choices: list[Choice]) -> Json:
        raise NotImplementedError

    def begin(self) -> list[Json]:
        return []

    def parts(self, choice: Choice, piece: TextPiece) -> list[Json]:
        """After ``add_piece``: what a stream sends of it."""
        raise NotImplementedError

    def end(self, choices: list[Choice]) -> list[Json]:
        return [self._header.wrap([], self._usage(choices))] if self._wants_usage else []

    def _usage(self, choices: list[Choice]) -> Json:
        return usage(self._prompt_tokens, sum(len(choice.token_ids) for choice in choices))


class CompletionAnswer(Answer):
    kind, prefix = "text_completion", "cmpl"

    def __init__(
        self, served: ServedModel, texts: TokenTexts, body: CompletionRequest, prompts: list[list[int]]
    ) -> None:
        super().__init__(served, texts, body, sum(map(len, prompts)))
        self._logprobs, self._token_ids = body.logprobs is not None, bool(body.return_token_ids)

    def whole(self, choices: list[Choice]) -> Json:
        found = [self._choice(choice, choice.text, choice.logprobs) for choice in choices]
        return self._header.wrap(found, self._usage(choices))

    def parts(self, choice: Choice, piece: TextPiece) -> list[Json]:
        return [self._header.wrap([self._choice(choice, piece.text, piece.logprobs)])]

    def _choice(self, choice: Choice, text: str, logprobs: list[TokenLogprobs]) -> Json:
        """A choice with all of its text, or with a part."""
        found = {
            "index": choice.index,
            "text": text,
            "logprobs": self._texts.completion(logprobs) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        return {**found, "token_ids": choice.token_ids} if self._token_ids else found


class ChatAnswer(Answer):
    kind, prefix = "chat.completion", "chatcmpl"

    def __init__(
        self, served: ServedModel, texts: TokenTexts, body: ChatRequest, prompt: list[int], *, has_tools: bool
    ) -> None:
        super().__init__(served, texts, body, len(prompt))
        self._logprobs, self._has_tools, self._choices = bool(body.logprobs), has_tools, body.n or 1
        if body.stream:
            self._header = AnswerHeader(self._header.id, self._header.model, "chat.completion.chunk")

    def whole(self, choices: list[Choice]) -> Json:
        found = []
        for choice in choices:
            content, calls = parse_tool_calls(choice.text) if self._has_tools else (choice.text, [])
            content = content.strip() if calls else content
            found.append(
                {
                    "index": choice.index,
                    "message": message(content, calls),
                    "logprobs": self._texts.chat(choice.logprobs) if self._logprobs else None,
                    "finish_reason": "tool_calls" if calls else choice.finish_reason,
                }
            )
        return self._header.wrap(found, self._usage(choices))

    def begin(self) -> list[Json]:
        return [self._part(place, {"role": "assistant", "content": ""}, None, None) for place in range(self._choices)]

    def parts(self, choice: Choice, piece: TextPiece) -> list[Json]:
        """What is before a call of a tool goes out at once; the calls at the end, when they are complete."""
        visible, calls = choice.text, list[AnswerToolCall]()
        if self._has_tools and choice.finish_reason is not None:
            visible, calls = parse_tool_calls(choice.text)
        elif self._has_tools:
            visible = choice.text.partition(TOOL_CALL)[0]
            visible = visible[: len(visible) - overlap(visible, TOOL_CALL)]
        delta: Json = {"content": visible[choice.sent :]} if len(visible) > choice.sent else {}
        choice.sent = max(choice.sent, len(visible))
        if calls:
            delta["tool_calls"] = tool_calls(calls, numbered=True)
        logprobs = self._texts.chat(piece.logprobs) if self._logprobs else None
        reason = "tool_calls" if calls else choice.finish_reason
        return [self._part(choice.index, delta, logprobs, reason)] if delta or logprobs or reason else []

    def _part(self, index: int, delta: Json, logprobs: Json | None, reason: str | None) -> Json:
        return self._header.wrap([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}])
