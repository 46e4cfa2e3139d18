"""z2a serve"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from zero2all.cli.conventions import CheckpointStep, Json, Result, Target, command

if TYPE_CHECKING:
    from zero2all.evals.target import TargetLocation
    from zero2all.model import Z2all

KEY_VARIABLE = "Z2A_API_KEY"
MAX_WAITING = 64  # requests in the queue: the server rejects more


@command
def serve(
    target: Target,
    host: Annotated[
        str, typer.Option(help="Address to listen on. With 0.0.0.0 other machines can reach it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. 0 picks a free port.")] = 8000,
    slots: Annotated[int, typer.Option(min=1, max=1024, help="Requests to generate at the same time.")] = 8,
    context: Annotated[
        int, typer.Option(min=2, help="Maximum tokens of a prompt with its answer; each slot has memory for them.")
    ] = 8192,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of an answer.")] = 4096,
    dtype: Annotated[
        Literal["auto", "f32", "bf16"],
        typer.Option(help="Type of weights and cache. Default: bf16 on a GPU, else f32."),
    ] = "auto",
    step: CheckpointStep = None,
    json: Json = False,
) -> Result:
    """Serve a model: OpenAI-compatible API and chat page.

    Every request needs the key that is printed at the start, or the one in the environment variable Z2A_API_KEY.

    Example: z2a serve runs/sft --port 8000
    """
    import secrets

    from zero2all.base.console import say
    from zero2all.base.errors import need
    from zero2all.base.units import show_bytes
    from zero2all.evals.target import find_target

    need("starlette", "serve")
    need("uvicorn", "serve")
    from zero2all.export.run_export import begin_token
    from zero2all.generation.serve.api_answers import ServedModel
    from zero2all.generation.serve.app import ServerLimits, build_api
    from zero2all.generation.serve.engine import ServingEngine
    from zero2all.track.http_server import serve as run_server

    found = find_target(target, step)
    begin_id = begin_token(found.run) if found.run is not None else found.tokenizer.begin_token_id
    is_base = not found.run.recipe.train.objective.is_chat if found.run else found.tokenizer.chat_template is None
    served = ServedModel(_name(found), found.tokenizer, begin_id, is_base)
    engine = ServingEngine(_load(found, dtype), found.tokenizer, slots, MAX_WAITING, context)
    given = os.environ.get(KEY_VARIABLE)
    key = given or secrets.token_urlsafe(24)
    app = build_api(engine, served, key, ServerLimits(max_tokens=max_tokens))

    def ready(bound: int) -> None:
        address = f"http://{f'[{host}]' if ':' in host else host}:{bound}"
        say(f"{served.name}: {slots} slots of {engine.context} tokens, a cache of {show_bytes(engine.cache_bytes)}")
        say(f"API: {address}/v1, " + (f"with the key in {KEY_VARIABLE}" if given else f"key {key}"))
        say(f"page: {address}/#key={'...' if given else key}")
        if is_base:
            say("this is a base model: it continues text, and the page opens in completion mode")
        say("Ctrl-C ends the server")

    with suppress(KeyboardInterrupt):
        run_server(app, host, port, ready)
    stats = engine.stats
    return Result(
        {"requests": stats.requests, "completed": stats.completed, "generated_tokens": stats.generated_tokens},
        f"{stats.completed} of {stats.requests} requests answered, {stats.generated_tokens} tokens generated",
    )


def _load(found: TargetLocation, dtype: str) -> Z2all:
    import torch

    model = found.load_merged_model()
    if dtype == "bf16" or (dtype == "auto" and model.rotary_2SE.device.type == "cuda"):
        for parameter in model.parameters():  # not the bias of experts, which decides between near ties
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def _name(found: TargetLocation) -> str:
    return found.run.recipe.name if found.run is not None else found.directory.resolve().name
