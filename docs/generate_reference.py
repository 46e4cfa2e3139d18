"""Write what the documentation takes from the code: ``python docs/generate_reference.py``.

The pages in docs/reference depend neither on the machine nor on the versions of libraries. tests/test_reference.py
checks that everything generated is current.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from reference_generator.architecture import layers_svg, package_layers
from reference_generator.cli_page import cli_page
from reference_generator.fragments import filled_pages, pyproject
from reference_generator.key_tests import KEY_TESTS, key_tests
from reference_generator.plugins_page import plugins_page
from reference_generator.python_page import python_page
from reference_generator.recipe_page import KEY_VERSIONS, key_versions, recipe_page

REFERENCE = Path(__file__).with_name("reference")


def generated() -> dict[Path, str]:
    """The text of each generated file."""
    return {
        REFERENCE / "recipe.md": recipe_page(),
        REFERENCE / "cli.md": cli_page(),
        REFERENCE / "plugins.md": plugins_page(),
        REFERENCE / "python.md": python_page(),
        KEY_TESTS: json.dumps(key_tests(), indent=1) + "\n",
        KEY_VERSIONS: json.dumps(key_versions(), indent=1) + "\n",
        REFERENCE.parent / "contribute" / "architecture.svg": layers_svg(package_layers(pyproject())),
        **filled_pages(),
    }


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8", newline="\n")
