"""Generated samples at each validation, for the run record."""

from __future__ import annotations

import torch

from zero2all.console import warn
from zero2all.errors import Z2aError
from zero2all.generation import SamplingParams, generate_batch
from zero2all.parallel import ParallelModel
from zero2all.recipe import Recipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import opening_prompts
from zero2all.track import RunRecord

NUM_SAMPLES = 3
SAMPLE_TOKENS = 64


def record_samples(record: RunRecord, step: int, model: ParallelModel, tokenizer: Tokenizer, recipe: Recipe) -> None:
    """Generate from a few prompts, on one rank. A sharded model generates none: no rank has all its weights.

    A failure, such as no memory for the KV cache, costs the samples, not the run.
    """
    if not model.is_replicated:
        return
    try:
        _generate_samples(record, step, model, tokenizer, recipe)
    except (RuntimeError, OSError, Z2aError) as error:  # torch's out-of-memory error is a RuntimeError
        warn(f"no samples at this validation: {error}")


def _generate_samples(record: RunRecord, step: int, model: ParallelModel, tokenizer: Tokenizer, recipe: Recipe) -> None:
    prompts = (recipe.evals.prompts or opening_prompts(recipe.tokens_dir, tokenizer, NUM_SAMPLES))[:NUM_SAMPLES]
    params = SamplingParams(max_tokens=SAMPLE_TOKENS, seed=recipe.seed)
    # Eager: compiled blocks would be compiled again for every length of the KV cache.
    with model.eval_mode(), torch.compiler.set_stance("force_eager"):
        completions = generate_batch(model.model, tokenizer, prompts, params)
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True), 1):
        record.sample(step, f"prompt {number}", f"{prompt}▸{completion.text}")
