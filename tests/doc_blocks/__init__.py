"""Pages whose blocks run as printed, in one module for each area of the documentation.

A module has ``PAGES``, and ``NOT_RUN`` with the reason for each page whose blocks no test can run. They are imported
when they are asked for: a module may also be a program of its own, such as a server that its pages talk to.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from types import ModuleType

from tests.doc_pages import Page

AREAS = ("start", "data", "train", "use", "scale", "survive", "explain", "evidence", "contribute")


def modules() -> Iterator[ModuleType]:
    for area in AREAS:
        if importlib.util.find_spec(f"{__name__}.{area}") is not None:
            yield importlib.import_module(f"{__name__}.{area}")


def pages() -> list[Page]:
    return [page for module in modules() for page in module.PAGES]


def not_run() -> dict[str, str]:
    """Reasons by page."""
    return {page: reason for module in modules() for page, reason in getattr(module, "NOT_RUN", {}).items()}
