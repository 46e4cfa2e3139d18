"""z2a train | goodput | eval | generate | export"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Overrides, RecipePath, Result, RunPath, command

Step = Annotated[int | None, typer.Option("--step", help="Which checkpoint; the newest if not given.")]


@command
def train(recipe: RecipePath, overrides: Overrides = None, json: Json = False) -> Result:
    """Train, or go on with a run that was stopped.

    Example: z2a train recipes/quickstart.yaml train.steps=200 model.n_layers=4
    """
    from zero2all.evals import bits_per_byte
    from zero2all.recipe import load_recipe
    from zero2all.resilience.goodput import process_started
    from zero2all.train import train

    summary = train(load_recipe(recipe, overrides), evaluate=bits_per_byte, began=process_started())
    first = os.environ.get("RANK", "0") == "0"  # of several ranks one says it
    return Result(summary, f"{summary['steps']} steps done; the run is in {summary['run']}" if first else "")


@command
def goodput(run: RunPath, json: Json = False) -> Result:
    """Show which share of a run's time moved training forward, over all its restarts, and where the rest went.

    Example: z2a goodput runs/first
    """
    from zero2all.resilience.goodput import goodput_of, in_words
    from zero2all.train import Run

    found = goodput_of(Run.open(run).directory)
    return Result(found, in_words(found))


@command
def evaluate(run: RunPath, step: Step = None, json: Json = False) -> Result:
    """Measure bits-per-byte on the held-out text.

    Example: z2a eval runs/first
    """
    from zero2all.evals import bits_per_byte
    from zero2all.train import Run

    opened = Run.open(run)
    quality = bits_per_byte(opened.load_model(step), opened.tokenizer(), opened.recipe)
    lines = [f"bits-per-byte {quality['bits_per_byte']:.4f} (unigram {quality['unigram_bits_per_byte']:.4f})"]
    lines += [f"  {name}: {part['bits_per_byte']:.4f}" for name, part in quality["sources"].items()]
    return Result(quality, "\n".join(lines))


@command
def generate(
    run: RunPath,
    prompt: Annotated[str, typer.Option("--prompt", help="What the text begins with.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among the k likeliest tokens; 0 among all.")] = 50,
    seed: int = 0,
    step: Step = None,
    json: Json = False,
) -> Result:
    """Let a trained model go on with a text.

    Example: z2a generate runs/first --prompt "def main("
    """
    from zero2all.serve import generate
    from zero2all.train import Run

    opened = Run.open(run)
    text = generate(opened.load_model(step), opened.tokenizer(), prompt, max_tokens, temperature, top_k, seed)
    return Result({"prompt": prompt, "text": text}, prompt + text)


@command
def export(
    run: RunPath,
    to: Annotated[Path, typer.Option("--to", help="The directory to write.")],
    step: Step = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="Store the weights in bf16.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Load it with transformers and compare logits.")] = False,
    json: Json = False,
) -> Result:
    """Write a Hugging Face directory of a standard architecture, for transformers, vLLM and llama.cpp.

    Example: z2a export runs/first --to runs/first/hf --check
    """
    from zero2all.train import Run, export_run

    result = export_run(Run.open(run), to, step, bf16, check)
    checked = f"; logits agree to {result['max_logit_difference']:.1e}" if check else ""
    return Result(result, f"exported to {to}{checked}")
