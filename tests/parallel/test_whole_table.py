"""What ``z2a bench parity`` measures, all of it."""

from __future__ import annotations

import pytest

from zero2all.parallel import parity


@pytest.mark.long
def test_every_layout_equals_one_process() -> None:
    outcomes = list(parity.measure(list(parity.cases()), 20))
    assert outcomes
    assert all(outcome.equal for outcome in outcomes), parity.table(outcomes)
