"""Filters over one document: keep it, drop it with a reason, or change its content.

``build_filters(DEFAULT_FILTERS)`` gives callables, ``apply_filters(filters, document)`` applies them to a document. A
new filter is a new file here, whose functions are registered: ``@register("filter", name)``.
"""

from __future__ import annotations

from typing import Any

from zero2all.corpus.filters.filter_registry import (
    KEEP,
    Change,
    Drop,
    FilterOutcome,
    FilterResult,
    Keep,
    apply_filters,
    build_filters,
)
from zero2all.corpus.filters.text_kinds import TextKind, classify_text

# Meant for any mixture of Chinese, English and code: books, poems, manuals and statutes pass, so lengths and repeated
# n-grams are wider than published for web pages. Filters that fix text come first, those that scan all of it last.
DEFAULT_FILTERS: tuple[dict[str, Any], ...] = (
    {"name": "normalize"}, {"name": "strip_gutenberg"}, {"name": "too_short"}, {"name": "too_long"},
    {"name": "code_generated"}, {"name": "secrets"},
    {
        "name": "gopher_quality", "min_words": 20, "max_words": 0, "max_word_length": 12, "min_chars_zh": 10,
        "max_chars_zh": 0,
    },
    {"name": "repeated_lines"},
    {
        "name": "gopher_repetition", "dup_n_grams": ((5, 0.35), (10, 0.25)),
        "dup_n_grams_zh": ((10, 0.45), (16, 0.3)),
    },
    {"name": "pii"},
)  # fmt: skip

# A short answer is a good one, and a call of a function repeats its words: only what holds for any text.
DEFAULT_CHAT_FILTERS = tuple(
    spec for spec in DEFAULT_FILTERS if spec["name"] in ("normalize", "too_long", "secrets", "pii")
)

__all__ = [
    "DEFAULT_CHAT_FILTERS",
    "DEFAULT_FILTERS",
    "KEEP",
    "Change",
    "Drop",
    "FilterOutcome",
    "FilterResult",
    "Keep",
    "TextKind",
    "apply_filters",
    "build_filters",
    "classify_text",
]
