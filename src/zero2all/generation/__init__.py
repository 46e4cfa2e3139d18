"""Text generation from a trained model: batches of prompts, with a KV cache."""

from zero2all.generation.decoder import Completion, TextPiece
from zero2all.generation.generate import generate_batch, stream
from zero2all.generation.sampling import SamplingParams

__all__ = ["Completion", "SamplingParams", "TextPiece", "generate_batch", "stream"]
