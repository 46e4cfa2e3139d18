"""Several faults at a time: the table keeps its order, and the end of the suite ends all of them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.chaos import suite
from tests.chaos.fault import Fault
from tests.chaos.scenario import Scenario
from tests.chaos.suite import Baseline, run_suite


@pytest.fixture(autouse=True)
def without_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faults here start no process."""
    monkeypatch.setattr(suite, "build_workspace", lambda root, seed: None)
    monkeypatch.setattr(suite, "run_baseline", lambda out, overrides: Baseline({}, 600.0))


def test_rows_are_in_the_order_of_the_faults_and_progress_in_that_of_their_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_ended, said = threading.Event(), list[str]()

    def say(text: str) -> None:
        said.append(text)
        second_ended.set()

    monkeypatch.setattr(suite, "say", say)
    first = Fault("first", drive=lambda scenario: scenario.wait_until(second_ended.is_set, "the second has ended"))
    rows = run_suite(tmp_path, [first, Fault("second", drive=lambda scenario: None)], jobs=2)
    assert [row.fault for row in rows] == ["first", "second"]
    assert [line.split(":")[0] for line in said] == ["1/2 second", "2/2 first"]
    assert "left" in said[0]
    assert "all in" in said[1]


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_ends_the_faults_that_run_and_starts_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    running, driven = threading.Event(), list[str]()

    def wait_forever(scenario: Scenario) -> None:
        driven.append(scenario.directory.name)
        running.set()
        scenario.wait_until(lambda: False, "the suite is ended")

    def interrupt(text: str) -> None:
        assert running.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "say", interrupt)
    waiting = [Fault(f"waits-{number}", drive=wait_forever) for number in range(3)]
    with pytest.raises(KeyboardInterrupt):
        run_suite(tmp_path, [Fault("ends", drive=lambda scenario: None), *waiting], jobs=jobs)
    assert len(driven) <= jobs
