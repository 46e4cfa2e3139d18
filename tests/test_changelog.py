"""CHANGELOG.md has the form of Keep a Changelog, and the version is the same everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from zero2all import __version__

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
KINDS = ["Added", "Changed", "Fixed", "Removed"]
MOVED = "Moved"  # import paths: a table, old to new
MAX_UNRELEASED = 8192  # bytes, without that table
MAX_RELEASED = 45  # lines
MAX_WIDTH = 120
INTERNAL = re.compile(r"zero2all\.|\.ci/|tests/|benchmarks/|\w+\.py\b")


def versions(text: str) -> dict[str, str]:
    """The text of each version by its heading."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def problems(text: str) -> list[str]:
    """What is wrong with the form of a changelog."""
    found = [] if text.startswith("# Changelog\n") else ["the first line is not '# Changelog'"]
    found += [f"wider than {MAX_WIDTH} columns: {line}" for line in text.splitlines() if len(line) > MAX_WIDTH]
    unreleased, *released = versions(text)
    found += [] if unreleased == "[Unreleased]" else [f"the first heading is {unreleased}"]
    numbers = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d", heading) for heading in released]
    found += [
        f"not a version with its date: {heading}" for heading, ok in zip(released, numbers, strict=True) if not ok
    ]
    order = [tuple(map(int, number.groups())) for number in numbers if number]
    found += [] if order == sorted(order, reverse=True) else ["versions are not in descending order"]
    for heading, whole in versions(text).items():
        body = whole.partition(f"### {MOVED}\n")[0]
        found += [f"{heading}: {problem}" for problem in body_problems(body)]
        if heading == "[Unreleased]":
            found += [] if len(body.encode()) <= MAX_UNRELEASED else [f"more than {MAX_UNRELEASED} bytes unreleased"]
            found += [f"internal: {line}" for line in body.splitlines() if INTERNAL.search(line)]
        elif body.count("\n") > MAX_RELEASED:
            found.append(f"{heading}: more than {MAX_RELEASED} lines")
    return found


def body_problems(body: str) -> list[str]:
    kinds = re.findall(r"^### (.+)$", body, flags=re.MULTILINE)
    found = [] if kinds == [kind for kind in KINDS if kind in kinds] else [f"headings {kinds}, not {KINDS}"]
    for part in re.split(r"^### .+$", body, flags=re.MULTILINE)[1:]:
        *_, entries = part.partition("\n\n")
        found += [] if entries.startswith("- ") else ["a heading without entries"]
        for entry in re.split(r"^- ", entries.rstrip("\n"), flags=re.MULTILINE)[1:]:
            if not re.fullmatch(r"[A-Z`.].*[.`]", entry.rstrip("\n")):
                found.append(f"not one line that ends with a period: {entry}")
    return found


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    assert problems(TEXT) == []


def test_a_changelog_in_a_different_form_is_found() -> None:
    for wrong in (
        TEXT.replace("## [Unreleased]", "## Next"),
        TEXT.replace("### Changed", "### Earlier", 1),
        TEXT.replace("### Added", "### Fixed", 1),
        TEXT.replace("[0.2.0]", "[0.0.1]"),
        TEXT.replace("### Added\n\n", "### Added\n\n- A\n  b.\n", 1),
        TEXT.replace("### Added\n\n", "### Added\n\n- no capital.\n", 1),
        TEXT.replace("### Added\n\n", "### Added\n\n- `zero2all.train.fit` is new.\n", 1),
        TEXT.replace("### Added\n\n", "### Added\n\n" + MAX_UNRELEASED // 8 * "- A line.\n", 1),
    ):  # fmt: skip
        assert problems(wrong) != []


def test_the_version_is_the_one_that_follows_the_newest_release() -> None:
    newest = list(versions(TEXT))[1].split("]")[0].lstrip("[")
    version, _, development = __version__.partition(".dev")
    numbers = [[int(part) for part in one.split(".")] for one in (version, newest)]
    assert numbers[0] > numbers[1] if development else numbers[0] == numbers[1]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == __version__
