"""Every regular expression in the project takes linear time on the worst input that its own structure suggests."""

import re
from functools import cache

import pytest

from tests.adversarial.pattern_attack import (
    GATE_SIZES,
    SIZES,
    Attack,
    FoundPattern,
    Target,
    attack,
    attack_all,
    find_patterns,
)

PARTS = 8
ADVICE = "bound its repetitions, make them possessive, or search without a pattern"


@cache
def patterns() -> list[FoundPattern]:
    """Not at import: it imports most of the project, which is not to be paid for by a worker that runs other tests."""
    return find_patterns()


def slow(attacked: list[FoundPattern], sizes: tuple[int, ...]) -> list[Attack]:
    return [one for one in attack_all(attacked, sizes=sizes) if not one.is_linear]


@pytest.mark.parametrize("number", range(PARTS))
def test_patterns_take_linear_time(number: int) -> None:
    assert not slow(patterns()[number::PARTS], GATE_SIZES), ADVICE


@pytest.mark.long
def test_the_largest_inputs_take_linear_time() -> None:
    """What grows only from 80 KB on; the table of the slowest: ``python -m tests.adversarial.pattern_attack``."""
    assert not slow(patterns(), SIZES), ADVICE


def planted(pattern: str) -> FoundPattern:
    return FoundPattern(pattern, pattern, re.compile(pattern, re.DOTALL).flags, ("search",))


@pytest.mark.parametrize(
    "pattern", [r"(a+)+b", r"(?:a|ab?|b)*c", r"^(\w+\s?)*$", r"(?:x+x+)+y", r"(?:<!--.*?-->|\s)*<html"]
)
def test_exponential_time_is_found_by_its_growth(pattern: str) -> None:
    assert attack(planted(pattern), GATE_SIZES).problem == "exponential"


@pytest.mark.parametrize(
    "pattern",
    [
        r"<script[^>]*>.*?</script>", r"\s*\n\s*", r"x\d+\d+y", r"(?=[a-z]*-)[a-z]",
        r"a.*b.*c.*d",
    ],
)  # fmt: skip
def test_quadratic_and_cubic_time_is_found_by_its_growth(pattern: str) -> None:
    found = attack(planted(pattern), GATE_SIZES)
    assert not found.is_linear
    assert not found.problem
    assert found.seconds[-1] > 8 * found.seconds[-2]


def test_a_pattern_that_is_slow_at_once_is_timed_at_two_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "seconds", lambda self, size: 1e-8 * size**2)
    found = Target(planted("a+b"), re.compile("a+b"), "search", ("", "a", "")).follow((5_000, *GATE_SIZES))
    assert not found.is_linear
    assert found.seconds == pytest.approx((0.25, 4.0))


def test_a_pattern_that_hangs_costs_only_itself() -> None:
    hangs = planted("(?:" + "x+" * 12 + ")+y")  # in three repetitions
    attacked = list(attack_all([planted("a+"), hangs, planted("a"), hangs], 1.0, GATE_SIZES))
    assert [one.place for one in attacked] == ["a+", hangs.pattern, "a", hangs.pattern]
    assert [one.problem for one in attacked] == ["", "not done in 1 s", "", "not done in 1 s"]


def test_patterns_are_collected() -> None:
    places = {found.place for found in patterns()}
    assert len(places) > 100
    assert "zero2all.corpus.filters.privacy._EMAIL" in places  # compiled in a module
    assert any(place.startswith("zero2all.recipe.sections:") for place in places)  # written where it is used
