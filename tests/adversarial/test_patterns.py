"""Every regular expression in the project takes linear time on the worst input that its own structure suggests."""

import re

import pytest

from tests.adversarial.pattern_attack import GATE_SIZES, FoundPattern, attack_in_time, find_patterns

PATTERNS = find_patterns()


@pytest.mark.parametrize("number", range(8))
def test_patterns_take_linear_time(number: int) -> None:
    slow = [one for found in PATTERNS[number::8] if not (one := attack_in_time(found, sizes=GATE_SIZES)).is_linear]
    assert not slow, "bound its repetitions, make them possessive, or search without a pattern"


@pytest.mark.long
def test_the_largest_inputs_take_linear_time() -> None:
    """What grows only from 80 KB on; the table of the slowest: ``python -m tests.adversarial.pattern_attack``."""
    slow = [one for found in PATTERNS if not (one := attack_in_time(found)).is_linear]
    assert not slow, "bound its repetitions, make them possessive, or search without a pattern"


@pytest.mark.parametrize(
    "pattern", [r"(a+)+b", r"<script[^>]*>.*?</script>", r"\s*\n\s*", r"(?:<!--.*?-->|\s)*<html", r"x\d+\d+y"]
)
def test_slow_patterns_are_found(pattern: str) -> None:
    found = FoundPattern("planted", pattern, re.compile(pattern, re.DOTALL).flags, ("search",))
    assert not attack_in_time(found, 5, GATE_SIZES).is_linear


def test_patterns_are_collected() -> None:
    places = {found.place for found in PATTERNS}
    assert len(places) > 100
    assert "zero2all.corpus.filters.privacy._EMAIL" in places  # compiled in a module
    assert any(place.startswith("zero2all.recipe.sections:") for place in places)  # written where it is used
