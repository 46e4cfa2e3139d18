"""The model of ``z2a chat --demo``, which ships with the package. ``python -m benchmarks demo_model`` trains it."""

from __future__ import annotations

from pathlib import Path

DIRECTORY = Path(__file__).parent / "model"
"""An export: weights, tokenizer, model card, and a manifest that says how it was made and how good it is."""
QUESTIONS = ("Tell me a story about Mia.", "给我讲一个小兔的故事。")
