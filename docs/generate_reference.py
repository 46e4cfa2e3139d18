"""Write the pages in docs/reference from the code: ``python docs/generate_reference.py``.

They depend neither on the machine nor on the versions of libraries; tests/test_reference.py checks that they are
current.
"""

from __future__ import annotations

from pathlib import Path

from reference_generator.cli_page import cli_page
from reference_generator.python_page import python_page
from reference_generator.recipe_page import recipe_page

REFERENCE = Path(__file__).with_name("reference")


def pages() -> dict[str, str]:
    """The text of each page by its file name."""
    return {"recipe.md": recipe_page(), "cli.md": cli_page(), "python.md": python_page()}


if __name__ == "__main__":
    for name, text in pages().items():
        (REFERENCE / name).write_text(text, encoding="utf-8", newline="\n")
