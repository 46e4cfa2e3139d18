"""No family has fewer cases than were once tried by hand, and no test that it names has gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adversarial.families import FAMILIES, Family, Tally, files, table

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_every_family_still_has_its_cases() -> None:
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", *files()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, cwd=ROOT, env=dict(os.environ))
    assert done.returncode == 0, done.stdout[-3000:]
    nodes = [line for line in done.stdout.splitlines() if line.startswith("tests/")]
    for family in FAMILIES:
        assert [test for test in family.tests if not any(Family("", 0, (test,)).holds(node) for node in nodes)] == []
        held = sum(family.holds(node) for node in nodes)
        assert family.counts or held >= family.noted, f"{family.name} has {held} of {family.noted} cases"


def test_the_table_adds_up() -> None:
    shown = table({family.name: Tally(3, 2, 1) for family in FAMILIES})
    count = len(FAMILIES)
    assert shown.endswith(f"| **all** | 439 | {3 * count} | {2 * count} | {count} |")
    assert len({family.name for family in FAMILIES}) == count
