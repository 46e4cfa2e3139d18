"""Questions that people ask: a page answers each, at most two clicks from the home page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from reference_generator.llms import pages_of, site_config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MAX_CLICKS = 2
QUESTIONS: list[dict[str, str]] = yaml.safe_load((ROOT / "tests" / "questions.yaml").read_text("utf-8"))


def clicks(page: str, config: dict[str, Any], home: str) -> int:
    """From the home page by its links, or by a tab, and then by the menu, in which sections are open or not."""
    if page == "index.md":
        return 0
    if re.search(rf"\]\({re.escape(page)}(?:#[^)]*)?\)", home):
        return 1
    above = {name: titles for titles, name in pages_of(config["nav"])}
    tabs = {titles[0]: name for name, titles in reversed(above.items()) if titles}
    if tabs.get(above[page][0]) == page:
        return 1
    closed = len(above[page]) - (2 if "navigation.sections" in config["theme"]["features"] else 1)
    return 2 + max(0, closed)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda one: one["question"])
def test_a_page_answers_within_two_clicks(question: dict[str, str]) -> None:
    page = DOCS / question["page"]
    assert re.search(question["answer"], page.read_text("utf-8")), "no such passage"
    assert page.with_suffix(".zh-CN.md").is_file()
    assert clicks(question["page"], site_config(), (DOCS / "index.md").read_text("utf-8")) <= MAX_CLICKS


def test_clicks_are_counted() -> None:
    config = {
        "theme": {"features": []},
        "nav": [{"Home": "index.md"}, {"A": ["a/x.md", {"B": ["a/b/y.md", "a/b/z.md"]}]}],
    }
    found = [clicks(page, config, "") for page in ("index.md", "a/x.md", "a/b/y.md", "a/b/z.md")]
    assert found == [0, 1, 3, 3]
    assert clicks("a/b/z.md", config, "see [z](a/b/z.md#part)") == 1
    config["theme"]["features"] = ["navigation.sections"]
    assert clicks("a/b/z.md", config, "") == 2
