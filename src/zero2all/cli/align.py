"""z2a align inspect | generate"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Overrides, RecipePath, Result, command, resumable_command

app = typer.Typer(help="Look at the data of fine-tuning, and generate more.", no_args_is_help=True)


@app.command()
@command
def inspect(
    recipe: RecipePath,
    overrides: Overrides = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Number of conversations.")] = 3,
    json: Json = False,
) -> Result:
    """Show in colour which tokens of conversations are learned.

    The tokens must have been built. Without a terminal, what is learned is between ⟦ and ⟧.

    Example: z2a align inspect sft.yaml --count 5
    """
    from zero2all.align.inspect import inspect_conversations, render_conversations
    from zero2all.recipe import load_recipe

    found = inspect_conversations(load_recipe(recipe, overrides), count)
    return Result({"conversations": found}, render_conversations(found, sys.stdout.isatty()))


@app.command()
@resumable_command
def generate(
    seeds: Annotated[Path, typer.Argument(help="Conversations to start from, as JSON lines.")],
    to: Annotated[Path, typer.Option("--to", help="File of JSON lines to append to.")],
    endpoint: Annotated[str, typer.Option(help="OpenAI-compatible API, such as http://127.0.0.1:8000/v1.")],
    model: Annotated[str, typer.Option(help="Name of the model at the endpoint.")],
    count: Annotated[int, typer.Option(min=1, help="Number of conversations that the file should have.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 0.9,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Number of requests at the same time.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the examples that are shown.")] = 0,
    json: Json = False,
) -> Result:
    """Write new conversations with a model behind an endpoint.

    The model sees a few seed instructions, writes another one, and answers it (self-instruct). Instructions that are
    similar to earlier ones are dropped. The same command resumes. The key of the API is read from Z2A_API_KEY.

    Example: z2a align generate seeds.jsonl --to more.jsonl --endpoint http://127.0.0.1:8000/v1 --model qwen --count 500
    """
    from zero2all.align.generate import GenerateOptions, generate_conversations

    options = GenerateOptions(endpoint, model, count, max_tokens, temperature, workers, seed=seed)
    made = generate_conversations(seeds, to, options)
    text = f"{made.total} conversations in {to}, {made.written} of them new; {made.too_similar} were too similar"
    return Result({"out": str(to), **asdict(made)}, text)
