"""z2a generate"""

from __future__ import annotations

import json as jsonlib
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zero2all.cli.conventions import Json, Result, RunPath, command
from zero2all.cli.runs import CheckpointStep, PipelineParallel, TensorParallel
from zero2all.console import sanitize
from zero2all.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zero2all.generation import Completion, TextPiece
    from zero2all.model import Z2all
    from zero2all.parallel import ParallelModel


@command
def generate(
    run: RunPath,
    prompt: Annotated[str, typer.Option("--prompt", help="The prompt.")] = "",
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="A file with a prompt on each line; in a .jsonl file, an object with the key 'prompt'.",
            metavar="FILE",
        ),
    ] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="Number of texts to generate for each prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature. 0 is greedy decoding.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most likely tokens. 0 samples from all.")] = 50,
    top_p: Annotated[
        float,
        typer.Option(help="Sample from the fewest of the most likely tokens that have this probability together."),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(help="Sample from tokens with at least this probability, relative to the most likely token."),
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1, tokens of the prompt and of the text so far become less likely.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the text before this string. May be given several times.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
    step: CheckpointStep = None,
    tp: TensorParallel = 1,
    pp: PipelineParallel = 1,
    json: Json = False,
) -> Result:
    """Generate text from a prompt, or from each prompt of a file.

    On a terminal, the text of a single prompt appears as it is generated.

    Example: z2a generate runs/first --prompt "def main("
    """
    from zero2all.generation import SamplingParams, generate_batch, stream
    from zero2all.recipe import ParallelRecipe
    from zero2all.train import Run

    if prompt and prompts is not None:
        raise UsageError("give --prompt or --prompts, not both")
    texts = [prompt] if prompts is None else _read_prompts(prompts)
    texts = [text for text in texts for _ in range(num_samples)]
    params = SamplingParams(max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, tuple(stop or ()), seed)
    opened = Run.open(run)
    tokenizer = opened.tokenizer()
    if tp * pp > 1:
        model: Z2all | ParallelModel = opened.load_parallel_model(
            ParallelRecipe(tp=tp, pp=pp, dp_shard=1, sp=False), step
        )
    else:
        model = opened.load_model(step)
    if len(texts) == 1 and not json and tp * pp == 1 and _stdout_is_terminal():
        return Result(None, _print_stream(texts[0], stream(model, tokenizer, texts, params)))
    completions = generate_batch(model, tokenizer, texts, params)
    data = [{"prompt": text, **asdict(completion)} for text, completion in zip(texts, completions, strict=True)]
    is_rank0 = os.environ.get("RANK", "0") == "0"  # only one of several ranks reports it
    return Result({"completions": data}, _format_completions(texts, completions) if is_rank0 else "")


def _read_prompts(path: Path) -> list[str]:
    if not path.is_file():
        raise UsageError(f"--prompts: no file at {path}")
    try:
        text = path.read_text(encoding="utf-8").rstrip("\n")
        lines = text.split("\n") if text else []
        prompts = [jsonlib.loads(line)["prompt"] for line in lines if line] if path.suffix == ".jsonl" else lines
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--prompts: cannot read {path}: {type(error).__name__}: {error}") from error
    if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise UsageError(f"--prompts: {path} must have a prompt on each line, as text")
    return prompts


def _stdout_is_terminal() -> bool:
    return sys.stdout.isatty()


def _print_stream(prompt: str, pieces: Iterator[TextPiece]) -> str:
    """Print the prompt and the text as it comes, without control characters; what is left to print."""
    sys.stdout.write(sanitize(prompt))
    sys.stdout.flush()
    for piece in pieces:
        sys.stdout.write(sanitize(piece.text))
        sys.stdout.flush()
    return "\n"


def _format_completions(prompts: list[str], completions: list[Completion]) -> str:
    texts = [prompt + completion.text for prompt, completion in zip(prompts, completions, strict=True)]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"── {number} {'─' * 40}\n{text}" for number, text in enumerate(texts, 1))
