"""A few seconds of fuzzing in the gate, and proof that the harness finds what it is for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from tests.adversarial.fuzz import Tally, Target, fuzz, fuzz_all, make_input, table
from tests.adversarial.fuzz_targets import TARGETS

SECONDS = 0.2  # for each target


def _hang() -> None:
    while True:
        pass


BUGS: dict[str, tuple[Callable[[], object], str, float]] = {
    "crashes": (os.abort, "status -6", 5.0),
    "hangs": (_hang, "more than 0.2 s", 0.2),
    "waits": (lambda: time.sleep(3600), "no answer", 0.2),
    "takes memory": (lambda: b"x" * (80 << 20), "MiB", 5.0),
    "raises": (lambda: {}["not an error that a user understands"], "KeyError", 5.0),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_and_the_search_goes_on(bug: str) -> None:
    act, said, seconds = BUGS[bug]
    target = Target("planted", lambda: [b"some ordinary text"], lambda data: b"\xff" in data and act())
    tally, until = Tally(), time.monotonic() + 60
    while not tally.findings or tally.inputs < 20:
        fuzz(target, 0.3, tally, seconds=seconds, memory=32 << 20)
        assert time.monotonic() < until, tally
    assert said in tally.findings[0]
    number = int(tally.findings[0].split()[1].rstrip(":"))
    assert b"\xff" in make_input(target, number), "its number makes the same input again"


@pytest.mark.parametrize("number", range(4))
def test_no_input_of_a_few_seconds_is_a_finding(number: int) -> None:
    targets = TARGETS[number::4]
    tallies = fuzz_all(targets, 0.0, turn=SECONDS)
    assert {name: tally.findings for name, tally in tallies.items() if tally.findings} == {}
    assert all(tally.inputs for tally in tallies.values())
    assert "**all**" in table(tallies)
