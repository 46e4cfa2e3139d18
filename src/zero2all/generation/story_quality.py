"""Measures a model that was trained on the built-in stories: it generates stories, and their grammar checks them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from zero2all.generation.generate import generate_batch
from zero2all.generation.sampling import SamplingParams
from zero2all.model import Z2all
from zero2all.parallel import ParallelModel
from zero2all.storyworld import StoryQuality, check_story, story_language, summarize_checks
from zero2all.tokenizer import Tokenizer

MAX_STORY_TOKENS = 384  # no story of the corpus has as many with a vocabulary of 1,024 tokens
TEMPERATURE = 0.5


@dataclass(frozen=True)
class StoryEvaluation:
    """Generated stories and their quality."""

    quality: StoryQuality
    stories: list[str]

    def first_of(self, language: str, count: int) -> list[str]:
        """The first stories in a language, as they were generated."""
        return list(islice((story for story in self.stories if story_language(story) == language), count))


def evaluate_stories(model: Z2all | ParallelModel, tokenizer: Tokenizer, count: int, seed: int = 0) -> StoryEvaluation:
    """Generate ``count`` stories without a prompt, each in the language that the model chooses, and check them."""
    params = SamplingParams(max_tokens=MAX_STORY_TOKENS, temperature=TEMPERATURE, seed=seed)
    stories = [completion.text for completion in generate_batch(model, tokenizer, [""] * count, params, count)]
    checks = (check_story(story, story_language(story)) for story in stories)
    return StoryEvaluation(summarize_checks(checks), stories)


def story_quality_line(quality: StoryQuality) -> str:
    """The quality in one line of text.

    >>> story_quality_line(StoryQuality(200, 1500, 0.943, 0.61, 90, None))
    'stories: 94 % of sentences parse, 61 % of stories are consistent, no sums'
    """
    parts = [
        (quality.parsed_share, "sentences", "parse"),
        (quality.consistent_share, "stories", "are consistent"),
        (quality.right_sum_share, "sums", "are right"),
    ]
    shown = [f"no {noun}" if share is None else f"{100 * share:.0f} % of {noun} {verb}" for share, noun, verb in parts]
    return "stories: " + ", ".join(shown)
