"""Short stories in English and Chinese, generated from a grammar, and a check of what a model writes after them."""

from zero2all.storyworld.check import StoryCheck, StoryProblem, StoryQuality, check_story, summarize_checks
from zero2all.storyworld.generate import LANGUAGES, generate_stories, generate_story, story_language

__all__ = [
    "LANGUAGES",
    "StoryCheck",
    "StoryProblem",
    "StoryQuality",
    "check_story",
    "generate_stories",
    "generate_story",
    "story_language",
    "summarize_checks",
]
