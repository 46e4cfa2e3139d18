"""``z2a serve``: an OpenAI-compatible API and a chat page for one model."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from zero2all.base.console import warn
from zero2all.base.errors import Z2aError
from zero2all.base.records import first_problem, map_texts
from zero2all.generation.decoder import GenerationRequest, TextPiece
from zero2all.generation.sampling import SamplingParams
from zero2all.generation.serve.api_answers import (
    Answer,
    ChatAnswer,
    Choice,
    CompletionAnswer,
    Json,
    ServedModel,
    TokenTexts,
    add_piece,
)
from zero2all.generation.serve.api_requests import ApiRequest, ChatRequest, CompletionRequest, openapi_schema
from zero2all.generation.serve.engine import BusyError, Failure, ServingEngine, TooManyAnswersError, metrics_text
from zero2all.tokenizer.chat import ChatTemplateError, TemplateLimitError
from zero2all.tokenizer.tokenizer import repair_surrogates
from zero2all.tokenizer.vocabulary import TOOL_CALL, TOOL_CALL_END
from zero2all.track.http_server import HEADERS, bearer_token

PAGE = Path(__file__).with_name("chat.html")
POLL_SECONDS = 1.0  # between two looks at whether a client is still there
DEFAULT_MAX_TOKENS = 512  # of a completion that does not say
Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True)
class ServerLimits:
    body_bytes: int = 8 * 2**20
    max_tokens: int = 4096
    """The limit of one answer."""
    seconds: float = 600.0
    """The limit of one request, with its time in the queue."""


class ApiError(Exception):
    """An answer with an error, in OpenAI's format."""

    def __init__(self, status: int, text: str, code: str | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.code = status, text, code

    def to_json(self) -> Json:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.text, "type": kind, "param": None, "code": self.code}}


class Channel:
    """Pieces of the choices of one request, from the thread of the engine to the event loop."""

    def __init__(self, engine: ServingEngine, requests: Sequence[GenerationRequest], seconds: float) -> None:
        """Raises ``BusyError`` if the engine takes no more."""
        self._engine, self._deadline = engine, time.monotonic() + seconds
        loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[TextPiece | Failure]()

        def receive(piece: TextPiece | Failure) -> None:
            loop.call_soon_threadsafe(self._queue.put_nowait, piece)

        self._numbers = engine.submit(requests, receive)

    def cancel(self) -> None:
        for number in self._numbers:
            self._engine.cancel(number)

    async def pieces(self, request: Request) -> AsyncIterator[tuple[int, TextPiece]]:
        """All pieces of all choices, each with the place of its choice, until the last one of each."""
        places = {number: place for place, number in enumerate(self._numbers)}
        left, looked = len(places), time.monotonic()
        while left:
            piece: TextPiece | Failure | None = None
            with suppress(TimeoutError):
                piece = await asyncio.wait_for(self._queue.get(), POLL_SECONDS)
            now = time.monotonic()
            if now > self._deadline:
                raise ApiError(504, "the answer took longer than the server allows", "timeout")
            if now - looked >= POLL_SECONDS:  # also while pieces come
                looked = now
                if await request.is_disconnected():
                    raise ApiError(499, "the client is gone")
            if isinstance(piece, Failure):
                raise ApiError(500, f"generation failed: {piece.reason}")
            if piece is not None:
                left -= piece.completion is not None
                yield places[piece.index], piece


class Api:
    """Request handlers."""

    def __init__(self, engine: ServingEngine, model: ServedModel, key: str | None, limits: ServerLimits) -> None:
        self._engine, self._model, self._key, self._limits = engine, model, key, limits
        self._texts = TokenTexts(model.tokenizer)
        special = model.tokenizer.special_ids
        self._tool_tokens = tuple(special[name] for name in (TOOL_CALL, TOOL_CALL_END) if name in special)
        self._page = PAGE.read_text(encoding="utf-8")
        script = self._page.split("<script>")[1].split("</script>")[0]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = (
            f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
            "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
        )
        self._page_headers = {**HEADERS, "Content-Security-Policy": policy}

    async def page(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html", headers=self._page_headers)

    async def health(self, request: Request) -> Response:
        if not self._engine.is_alive:
            raise ApiError(503, "the engine has stopped: start the server again")
        return JSONResponse({"status": "ok"})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi_schema())

    async def metrics(self, request: Request) -> Response:
        self._check_key(request)
        return Response(metrics_text(self._engine), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        return JSONResponse({"object": "list", "data": [self._model_json()]})

    async def one_model(self, request: Request) -> Response:
        self._check_key(request)
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model_json())

    def _model_json(self) -> Json:
        model = self._model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "zero2all",
            "max_model_len": self._engine.context,
            "base_model": model.is_base,
        }

    async def completions(self, request: Request) -> Response:
        body = await self._read(request, CompletionRequest)
        self._check_model(body.model)
        prompts = await run_in_threadpool(self._prompts, body)
        most = body.max_tokens or DEFAULT_MAX_TOKENS
        requests = [
            self._generation(body, prompt, most, occurrence, body.logprobs)
            for prompt in prompts
            for occurrence in range(body.n or 1)
        ]
        answer = CompletionAnswer(self._model, self._texts, body, prompts)
        return await self._answer(request, body, requests, answer)

    async def chat(self, request: Request) -> Response:
        body = await self._read(request, ChatRequest)
        self._check_model(body.model)
        tools = None
        if body.tools and body.tool_choice != "none":
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
        prompt = await run_in_threadpool(self._render, [one.to_template() for one in body.messages], tools)
        most = body.max_completion_tokens or body.max_tokens or self._engine.context
        top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        special_tokens = self._tool_tokens if tools else ()
        requests = [
            self._generation(body, prompt, most, occurrence, top_logprobs, special_tokens)
            for occurrence in range(body.n or 1)
        ]
        return await self._answer(
            request, body, requests, ChatAnswer(self._model, self._texts, body, prompt, has_tools=bool(tools))
        )

    def _check_key(self, request: Request) -> None:
        if self._key is not None and not hmac.compare_digest(bearer_token(request).encode(), self._key.encode()):
            raise ApiError(401, "the key is missing or wrong: send 'Authorization: Bearer KEY'", "invalid_api_key")

    def _check_model(self, name: str) -> None:
        if name and name != self._model.name:
            raise ApiError(
                404, f"there is no model {name[:100]!r}; this server has {self._model.name!r}", "model_not_found"
            )

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        size = self._model.tokenizer.vocab_size
        if wrong := next((token for token in tokens if token >= size), None):
            raise ApiError(400, f"token {wrong} is not in the vocabulary of {size} tokens")

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        """The body, after the key was checked."""
        self._check_key(request)
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > self._limits.body_bytes:
                raise ApiError(413, f"the request has more than {self._limits.body_bytes:,} bytes")
        try:
            value = json.loads(bytes(data))
            if b"\\ud" in data.lower():  # an escaped surrogate, which no answer could repeat
                value = map_texts(value, repair_surrogates)
            return kind.model_validate(value)
        except ValidationError as error:
            raise ApiError(400, first_problem(error)) from error
        except (ValueError, RecursionError) as error:
            raise ApiError(400, "the body is not valid JSON in UTF-8") from error

    def _encode(self, text: str) -> list[int]:
        begin = [] if self._model.begin_id is None else [self._model.begin_id]
        return [*begin, *self._model.tokenizer.encode(text)]

    def _prompts(self, body: CompletionRequest) -> list[list[int]]:
        given = body.prompt
        if isinstance(given, str):
            return [self._encode(given)]
        if given and isinstance(given[0], int):
            self._check_tokens(given)
            return [given]
        prompts = []
        for one in given:
            if isinstance(one, int):
                raise ApiError(400, "prompt: token ids and texts are mixed")
            if isinstance(one, list):
                self._check_tokens(one)
            prompts.append(self._encode(one) if isinstance(one, str) else one)
        if not prompts:
            raise ApiError(400, "prompt: it is empty")
        return prompts

    def _render(self, messages: list[Json], tools: list[Json] | None) -> list[int]:
        try:
            return self._model.tokenizer.render_chat(messages, tools, add_generation_prompt=True)
        except TemplateLimitError as error:
            warn(str(error))
            raise ApiError(400, "messages: the chat template takes too long or needs too much memory") from error
        except ChatTemplateError as error:
            raise ApiError(400, f"messages: {error}") from error
        except RecursionError:
            raise ApiError(400, "messages or tools are nested too deeply") from None
        except Z2aError as error:
            raise ApiError(400, f"this model has no chat template ({error}): use /v1/completions") from error

    def _generation(
        self,
        body: ApiRequest,
        prompt: list[int],
        most: int,
        occurrence: int,
        top_logprobs: int | None,
        special_tokens: tuple[int, ...] = (),
    ) -> GenerationRequest:
        room = self._engine.context - len(prompt)
        if not prompt:
            raise ApiError(400, "the prompt has no tokens")
        if room < 1:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens, and the model takes {self._engine.context} with the answer",
                "context_length_exceeded",
            )
        params = SamplingParams(
            max_tokens=min(most, room, self._limits.max_tokens),
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=max(0, body.top_k or 0),
            top_p=body.top_p or 1.0,
            min_p=body.min_p or 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            stop=body.stops,
            seed=secrets.randbits(62) if body.seed is None else body.seed,
        )
        return GenerationRequest(0, prompt, params.max_tokens, params, occurrence, top_logprobs, special_tokens)

    async def _answer(
        self, request: Request, body: ApiRequest, requests: list[GenerationRequest], answer: Answer
    ) -> Response:
        try:
            channel = Channel(self._engine, requests, self._limits.seconds)
        except BusyError as error:
            raise ApiError(429, str(error), "busy") from error
        except TooManyAnswersError as error:
            raise ApiError(400, str(error)) from error
        if body.stream:
            return StreamingResponse(
                self._stream(request, channel, answer),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-store"},
                background=BackgroundTask(channel.cancel),  # also if the stream never begins
            )
        choices = [Choice(place) for place in range(len(requests))]
        try:
            async for place, piece in channel.pieces(request):
                add_piece(choices[place], piece)
        finally:
            channel.cancel()
        return JSONResponse(answer.whole(choices))

    async def _stream(self, request: Request, channel: Channel, answer: Answer) -> AsyncIterator[str]:
        """Server-sent events. A client that goes away ends this generator, and its request with it."""
        choices: dict[int, Choice] = {}
        try:
            for part in answer.begin():
                yield f"data: {json.dumps(part, ensure_ascii=False)}\n\n"
            async for place, piece in channel.pieces(request):
                choice = choices.setdefault(place, Choice(place))
                add_piece(choice, piece)
                for part in answer.parts(choice, piece):
                    yield f"data: {json.dumps(part, ensure_ascii=False)}\n\n"
            for part in answer.end(list(choices.values())):
                yield f"data: {json.dumps(part, ensure_ascii=False)}\n\n"
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield f"data: {json.dumps(error.to_json())}\n\n"
        finally:
            channel.cancel()


def build_api(
    engine: ServingEngine, model: ServedModel, key: str | None, limits: ServerLimits | None = None
) -> Starlette:
    """The engine runs while the app does."""
    api = Api(engine, model, key, limits or ServerLimits())

    @asynccontextmanager
    async def running(app: Starlette) -> AsyncIterator[None]:
        with engine:
            yield

    posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/v1/completions": api.completions,
        "/v1/chat/completions": api.chat,
    }
    routes = [
        Route("/", api.page),
        Route("/health", api.health),
        Route("/openapi.json", api.openapi),
        Route("/metrics", api.metrics),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.one_model),
        *(Route(path, handler, methods=["POST"]) for path, handler in posts.items()),
    ]
    handlers: dict[Any, Any] = {ApiError: _api_error, HTTPException: _http_error, Exception: _server_error}
    return Starlette(routes=routes, lifespan=running, exception_handlers=handlers)


def _api_error(request: Request, error: ApiError) -> Response:
    headers = {"Retry-After": "1"} if error.status == 429 else {}
    return JSONResponse(error.to_json(), error.status, headers)


def _http_error(request: Request, error: HTTPException) -> Response:
    return JSONResponse(ApiError(error.status_code, error.detail).to_json(), error.status_code, error.headers)


def _server_error(request: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(500, "the server failed; its log says why").to_json(), 500)
