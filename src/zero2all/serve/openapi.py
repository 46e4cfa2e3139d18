"""``/openapi.json``: the requests that the API takes, for tools that generate clients or tests from it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from zero2all import __version__
from zero2all.serve.api_requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
GETS = ("/v1/models", "/health", "/metrics")
ANSWERS = {
    "200": {"description": "The answer."},
    "4XX": {"description": "What is wrong with the request, in OpenAI's format."},
    "501": {"description": "What has to be installed for it."},
}


def openapi_schema() -> dict[str, Any]:
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
