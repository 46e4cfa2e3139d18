"""Write what the documentation takes from the code: ``python docs/generate_reference.py``.

With ``--missing`` it writes nothing, and lists the English texts of the reference that have no Chinese translation in
docs/reference_generator/catalogue.zh-CN.json, and translations that nothing uses; exit status 1 if there are any.

The pages in docs/reference depend neither on the machine nor on the versions of libraries. tests/test_reference.py
checks that everything generated is current.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from reference_generator.architecture import layers_svg, package_layers
from reference_generator.catalogue import Chinese
from reference_generator.cli_page import cli_page
from reference_generator.errors_page import errors_page
from reference_generator.fragments import filled_pages, pyproject
from reference_generator.key_tests import KEY_TESTS, key_tests
from reference_generator.llms import LLMS, llms_text
from reference_generator.plugins_page import plugins_page
from reference_generator.python_page import python_page
from reference_generator.recipe_page import KEY_VERSIONS, key_versions, recipe_page

REFERENCE = Path(__file__).with_name("reference")


def generated() -> dict[Path, str]:
    """The text of each generated file."""
    return {
        REFERENCE / "recipe.md": recipe_page(),
        REFERENCE / "recipe.zh-CN.md": recipe_page(Chinese()),
        REFERENCE / "cli.md": cli_page(),
        REFERENCE / "cli.zh-CN.md": cli_page(Chinese()),
        REFERENCE / "errors.md": errors_page(),
        REFERENCE / "errors.zh-CN.md": errors_page(chinese=True),
        REFERENCE / "plugins.md": plugins_page(),
        REFERENCE / "python.md": python_page(),
        LLMS: llms_text(),
        KEY_TESTS: json.dumps(key_tests(), indent=1) + "\n",
        KEY_VERSIONS: json.dumps(key_versions(), indent=1) + "\n",
        REFERENCE.parent / "contribute" / "architecture.svg": layers_svg(package_layers(pyproject())),
        **filled_pages(),
    }


def untranslated() -> list[str]:
    """What keeps the Chinese reference from being complete, a line each."""
    chinese = Chinese()
    for write in (recipe_page, cli_page):
        write(chinese)
    return [
        *(f"no translation: {text}" for text in chinese.missing),
        *(f"no longer used: {text}" for text in chinese.unused),
    ]


if __name__ == "__main__":
    if sys.argv[1:] == ["--missing"]:
        found = untranslated()
        sys.stdout.write("".join(f"{line}\n" for line in found))
        sys.exit(1 if found else 0)
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8", newline="\n")
