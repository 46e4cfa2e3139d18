"""The whole attack, and its table.

python -m tests.adversarial                         # every case, also the long ones
python -m tests.adversarial -m 'not long' -n 2      # those of the gate; options are pytest's
python -m tests.adversarial --collect-only          # count only
"""

from __future__ import annotations

import sys

import pytest

from tests.adversarial.families import CHECK_OF_TABLE, FAMILIES, Tally, files, table


class Counter:
    """Counts what pytest collects and reports, by family."""

    def __init__(self) -> None:
        self.tallies = {family.name: Tally() for family in FAMILIES}
        self.failed: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            for item in session.items:
                for tally in self._of(item.nodeid):
                    tally.cases += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        more = dict(report.user_properties).get("cases", 1) - 1 if report.when == "call" else 0
        for tally in self._of(report.nodeid):
            tally.cases += more + (report.when == "setup")  # what pytest-xdist collects is known to its workers only
            tally.survived += (1 + more) * (report.when == "call" and report.passed)
            tally.skipped += report.skipped
        if report.failed:
            self.failed.append(report.nodeid)

    def too_few(self) -> int:
        """Whether a family has fewer cases than were once tried by hand."""
        return int(any(self.tallies[family.name].cases < family.noted for family in FAMILIES))

    def _of(self, node: str) -> list[Tally]:
        return [self.tallies[family.name] for family in FAMILIES if family.holds(node)]


def main() -> None:
    counter = Counter()
    options = sys.argv[1:] if any(word.startswith("-m") for word in sys.argv[1:]) else ["-m", "", *sys.argv[1:]]
    plugin = ["-p", "tests.adversarial.selection"]
    status = pytest.main(["-q", "--timeout=900", *plugin, *options, *files(), CHECK_OF_TABLE], plugins=[counter])
    sys.stdout.write(f"\n{table(counter.tallies)}\n")
    for node in counter.failed:
        sys.stdout.write(f"not survived: {node}\n")
    sys.exit(int(status) or (counter.too_few() if "--collect-only" not in options else 0))


if __name__ == "__main__":
    main()
