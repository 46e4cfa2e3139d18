"""Measures models of the story world: of the stories that one generates by the grammar, of the answers of a chat model
by whether it stops, is right and stays in its role."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median

from zero2all.generation.generate import generate_batch
from zero2all.generation.sampling import SamplingParams
from zero2all.model import Z2all
from zero2all.parallel import ParallelModel
from zero2all.storyworld import StoryQuality, check_story, story_language, summarize_checks
from zero2all.storyworld.conversations import StoryConversation, generate_conversations
from zero2all.storyworld.generate import LANGUAGES
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
    'stories: 94% of sentences parse, 61% of stories are consistent, no sums'
    """
    parts = [
        (quality.parsed_share, "sentences", "parse"),
        (quality.consistent_share, "stories", "are consistent"),
        (quality.right_sum_share, "sums", "are right"),
    ]
    shown = [f"no {noun}" if share is None else f"{100 * share:.0f}% of {noun} {verb}" for share, noun, verb in parts]
    return "stories: " + ", ".join(shown)


HELD_OUT_FROM = 1_000_000  # numbers of conversations from here on are never trained on
MAX_ANSWER_TOKENS = 256
ROLE_HEADER = re.compile(r"^(?:system|user|assistant)$", re.MULTILINE)


@dataclass(frozen=True)
class StoryAnswer:
    """An answer of the model."""

    conversation: StoryConversation
    text: str
    stopped: bool
    """It ended its message itself."""
    right: bool | None
    """None if there is no one right answer."""

    @property
    def has_user_turn(self) -> bool:
        """Whether it continues with a message of somebody else."""
        return ROLE_HEADER.search(self.text) is not None


@dataclass(frozen=True)
class ChatQuality:
    """The quality of many answers."""

    answers: int
    stopped: int
    user_turns: int
    median_length: float
    """In characters."""
    median_reference_length: float
    checkable: int
    right: int

    def __str__(self) -> str:
        return (
            f"{self.stopped} of {self.answers} answers end by themselves, {self.right} of {self.checkable} that can be "
            f"checked are right, the median has {self.median_length:g} characters (reference "
            f"{self.median_reference_length:g})"
        )


@dataclass(frozen=True)
class ChatEvaluation:
    quality: ChatQuality
    answers: list[StoryAnswer]

    def first_of(self, kinds: Sequence[str]) -> list[StoryAnswer]:
        """The first answer of each kind in each language."""
        found: dict[tuple[str, bool], StoryAnswer] = {}
        for answer in self.answers:
            key = (answer.conversation.kind, answer.conversation.prompt[-1]["content"].isascii())
            if key[0] in kinds:
                found.setdefault(key, answer)
        return list(found.values())


def held_out_conversations(seed: int, per_language: int) -> list[StoryConversation]:
    return [
        one
        for language in LANGUAGES
        for one in generate_conversations(language, seed, per_language, first=HELD_OUT_FROM)
    ]


def evaluate_chat(model: Z2all, tokenizer: Tokenizer, conversations: Sequence[StoryConversation]) -> ChatEvaluation:
    """The model's answers to the last question of each conversation, by greedy decoding."""
    prompts = [tokenizer.render_chat(one.prompt, add_generation_prompt=True) for one in conversations]
    params = SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=0.0)
    completions = generate_batch(model, tokenizer, prompts, params)
    answers = [
        StoryAnswer(one, completion.text, completion.finish_reason == "stop", one.is_right(completion.text))
        for one, completion in zip(conversations, completions, strict=True)
    ]
    checked = [answer.right for answer in answers if answer.right is not None]
    quality = ChatQuality(
        answers=len(answers),
        stopped=sum(answer.stopped for answer in answers),
        user_turns=sum(answer.has_user_turn for answer in answers),
        median_length=median(len(answer.text) for answer in answers),
        median_reference_length=median(len(answer.conversation.reference) for answer in answers),
        checkable=len(checked),
        right=sum(checked),
    )
    return ChatEvaluation(quality, answers)
