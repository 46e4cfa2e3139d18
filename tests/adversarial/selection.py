"""A plugin of pytest that keeps the tests of a family, though their files hold others; loaded by every worker."""

from __future__ import annotations

import pytest

from tests.adversarial.families import CHECK_OF_TABLE, FAMILIES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [
        item
        for item in items
        if item.nodeid.startswith(CHECK_OF_TABLE) or any(family.holds(item.nodeid) for family in FAMILIES)
    ]
