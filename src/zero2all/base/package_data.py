"""Tables and texts that are files of the package."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any


def read_package_text(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


def read_package_table(package: str, name: str) -> dict[str, Any]:
    """A TOML file beside the module that reads it: ``read_package_table(__package__, "words.toml")``."""
    return tomllib.loads(read_package_text(package, name))
