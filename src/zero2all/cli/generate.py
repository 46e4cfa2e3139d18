"""z2a chat --prompt: text completion."""

from __future__ import annotations

import json as jsonlib
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zero2all.cli.conventions import Result
from zero2all.console import sanitize
from zero2all.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zero2all.generation import Completion, SamplingParams, TextPiece
    from zero2all.model import Z2all
    from zero2all.parallel import ParallelModel


@dataclass(frozen=True)
class Request:
    """What ``z2a chat --prompt`` is asked for."""

    prompt: str | None
    prompts: Path | None
    num_samples: int
    params: SamplingParams


def complete_prompts(target: str, step: int | None, request: Request, tp: int, pp: int, json: bool) -> Result:
    """Complete the text of a prompt, or of each prompt of a file, without a chat template."""
    from zero2all.evals.target import find_target
    from zero2all.generation import generate_batch, stream
    from zero2all.recipe import ParallelRecipe

    if request.prompt is not None and request.prompts is not None:
        raise UsageError("give --prompt or --prompts, not both")
    texts = [request.prompt or ""] if request.prompts is None else _read_prompts(request.prompts)
    texts = [text for text in texts for _ in range(request.num_samples)]
    found = find_target(target, step)
    if tp * pp > 1:
        model: Z2all | ParallelModel = found.load_parallel_model(ParallelRecipe(tp=tp, pp=pp, dp_shard=1, sp=False))
    else:
        model = found.load_model()
    tokenizer, params = found.tokenizer, request.params
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
