"""What ``z2a bench parity`` measures, all of it."""

from __future__ import annotations

import pytest

from zero2all.bench.parity import measure, table
from zero2all.bench.parity_cases import cases


@pytest.mark.long
def test_every_layout_equals_one_process() -> None:
    outcomes = list(measure(cases(), 20))
    assert outcomes
    assert all(outcome.equal for outcome in outcomes), table(outcomes)
