"""Pages for contributors, and generated ones."""

from __future__ import annotations

from tests.doc_pages import Page

PAGES: list[Page] = []
NOT_RUN = {
    "docs/contribute/release-checklist.md": "publishes a release",
    "docs/reference/gpus.md": "its command writes a file for a GPU that is not here",
}
