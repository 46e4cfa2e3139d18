"""Bodies of requests in OpenAI's format, with limits. Unknown fields are ignored, as OpenAI's server does."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator
from pydantic.json_schema import models_json_schema

from zero2all import __version__

MAX_STOPS = 16
MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 10_000
REFUSED = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "logit_bias"), "use repetition_penalty"),
    "echo": "score texts with 'z2a eval lm-eval'",
    "response_format": "serve an export with vLLM or llama.cpp",
}
"""Fields that ask for what this server does not do, and what to do instead."""
Stop = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0)]


class ApiRequest(BaseModel):
    """What all requests to generate have."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str = ""
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    """0 and -1 are off."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    echo: bool | None = None
    response_format: dict[str, Any] | None = None

    @field_validator(*REFUSED)
    @classmethod
    def _refuse(cls, value: object, info: ValidationInfo) -> object:
        if value and value != {"type": "text"}:
            raise ValueError(f"is not supported; {REFUSED[str(info.field_name)]}")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class CompletionRequest(ApiRequest):
    """``/v1/completions``"""

    prompt: str | list[TokenId] | Annotated[list[str | list[TokenId]], Field(max_length=128)]
    max_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    return_token_ids: bool | None = None
    """The ids of what was generated, as ``token_ids`` of a choice, as in vLLM. Not in streams."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class FunctionCall(BaseModel):
    name: str
    arguments: str | dict[str, Any] = "{}"

    def to_template(self) -> dict[str, Any]:
        """Arguments as an object, which templates write as JSON; clients send them as a text."""
        arguments = self.arguments
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                parsed = json.loads(arguments)
                arguments = parsed if isinstance(parsed, dict) else arguments
        return {"name": self.name, "arguments": arguments}


class MessageToolCall(BaseModel):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None

    def to_template(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or [])
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "id": call.id, "function": call.function.to_template()} for call in self.tool_calls
            ]
        return message


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: dict[str, Any]


class ChatRequest(ApiRequest):
    """``/v1/chat/completions``"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None


BODIES: dict[str, type[BaseModel]] = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
GETS = ("/v1/models", "/health", "/metrics")
ANSWERS = {
    "200": {"description": "The answer."},
    "4XX": {"description": "What is wrong with the request, in OpenAI's format."},
}


def openapi_schema() -> dict[str, Any]:
    """``/openapi.json``: the requests that the API takes, for tools that generate clients or tests from it."""
    references, definitions = models_json_schema(
        [(body, "validation") for body in BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {path: {"get": {"responses": ANSWERS}} for path in GETS}
    for path, body in BODIES.items():
        content = {"application/json": {"schema": references[(body, "validation")]}}
        paths[path] = {"post": {"requestBody": {"required": True, "content": content}, "responses": ANSWERS}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "zero2all", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }
