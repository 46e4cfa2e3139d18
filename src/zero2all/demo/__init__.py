"""The model of ``z2a chat --demo``, which ships with the package. ``zero2all.demo.make`` trains it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path(__file__).parent / "model"
"""An export: weights, tokenizer, model card and manifest."""
QUESTIONS = ("Tell me a story about Mia.", "给我讲一个小兔的故事。")


@dataclass(frozen=True)
class DemoRecord:
    """How the model was made and how good it is: ``demo`` in the manifest of the export."""

    overrides: list[str]
    chat_overrides: list[str]
    precision: str
    """What the weights were trained in; they are stored in bf16."""
    torch: str
    base_bits_per_byte: float
    """On validation stories, before fine-tuning."""
    bits_per_byte: float
    """On reference answers in the validation set."""
    right: int
    """Correct answers to questions that it was not trained on."""
    checkable: int
