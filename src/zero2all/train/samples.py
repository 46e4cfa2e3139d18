"""Generated samples at each validation, for the run record."""

from __future__ import annotations

from zero2all.base.console import say, warn
from zero2all.base.errors import Z2aError
from zero2all.generation import SamplingParams, evaluate_stories, generate_batch, story_quality_line
from zero2all.parallel import ParallelModel
from zero2all.recipe import Recipe
from zero2all.storyworld import LANGUAGES
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import opening_prompts
from zero2all.track import RunRecord
from zero2all.track.step_text import COLUMNS, shorten

NUM_SAMPLES = 3
SAMPLE_TOKENS = 64


def record_samples(record: RunRecord, step: int, model: ParallelModel, tokenizer: Tokenizer, recipe: Recipe) -> None:
    """Generate from a few prompts, on one rank. A sharded model generates none: no rank has all its weights.

    A failure, such as no memory for the KV cache, costs the samples, not the run.
    """
    if not model.is_replicated:
        return
    try:
        (_record_stories if recipe.evals.stories else _record_completions)(record, step, model, tokenizer, recipe)
    except (RuntimeError, OSError, Z2aError) as error:  # torch's out-of-memory error is a RuntimeError
        warn(f"no samples at this validation: {error}")


def _record_stories(record: RunRecord, step: int, model: ParallelModel, tokenizer: Tokenizer, recipe: Recipe) -> None:
    """The quality of generated stories as metrics of the step, and the first story of each language."""
    evaluation = evaluate_stories(model, tokenizer, recipe.evals.stories, recipe.seed)
    quality = evaluation.quality
    shares = {
        "stories/parsed sentences": quality.parsed_share,
        "stories/consistent stories": quality.consistent_share,
        "stories/right sums": quality.right_sum_share,
    }
    record.step(step, **{name: share for name, share in shares.items() if share is not None})
    say(story_quality_line(quality))
    for language in LANGUAGES:
        for text in evaluation.first_of(language, 1):
            _record_sample(record, step, language, text)


def _record_completions(
    record: RunRecord, step: int, model: ParallelModel, tokenizer: Tokenizer, recipe: Recipe
) -> None:
    prompts = recipe.evals.prompts[:NUM_SAMPLES] or opening_prompts(recipe.tokens_dir, tokenizer, NUM_SAMPLES)
    params = SamplingParams(max_tokens=SAMPLE_TOKENS, seed=recipe.seed)
    completions = generate_batch(model, tokenizer, prompts, params)
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True), 1):
        _record_sample(record, step, f"prompt {number}", f"{prompt}▸{completion.text}")


def _record_sample(record: RunRecord, step: int, name: str, text: str) -> None:
    record.sample(step, name, text)
    say(shorten(f"  {name}: {' '.join(text.split())}", COLUMNS))
