"""Texts of the reference pages in Chinese, by their English text, from catalogue.zh-CN.json.

A text without a translation stays English, so that a change of a help text breaks nothing. ``python
docs/generate_reference.py --missing`` lists them; the release checklist asks for an empty list.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

CATALOGUE = Path(__file__).with_name("catalogue.zh-CN.json")

Say = Callable[[str], str]
"""From an English text to the text in the language of the page."""


def english(text: str) -> str:
    return text


class Chinese:
    """Translates, and notes what it has no translation of and which translations it used."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = json.loads(CATALOGUE.read_text("utf-8"))
        self.missing: dict[str, None] = {}
        self.used: set[str] = set()

    def __call__(self, text: str) -> str:
        if not text or text.startswith("```"):
            return text
        self.used.add(text)
        if text not in self.texts:
            self.missing[text] = None
        return self.texts.get(text, text)

    @property
    def unused(self) -> list[str]:
        return [text for text in self.texts if text not in self.used]
