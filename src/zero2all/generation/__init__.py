"""Text generation from a trained model: batches of prompts, with a KV cache."""

from zero2all.generation.decoder import Completion, TextPiece
from zero2all.generation.generate import generate_batch, stream
from zero2all.generation.sampling import SamplingParams
from zero2all.generation.story_quality import StoryEvaluation, evaluate_stories, story_quality_line

__all__ = [
    "Completion",
    "SamplingParams",
    "StoryEvaluation",
    "TextPiece",
    "evaluate_stories",
    "generate_batch",
    "story_quality_line",
    "stream",
]
