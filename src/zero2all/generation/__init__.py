"""Text generation from a trained model: batches of prompts, with a KV cache."""

from zero2all.generation.generate import Completion, TextPiece, generate_batch, stream
from zero2all.generation.sampling import SamplingParams

__all__ = ["Completion", "SamplingParams", "TextPiece", "generate_batch", "stream"]
