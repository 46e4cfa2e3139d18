"""The fault suite: a short run for real, several faults at a time, and that it detects a job that did not recover."""

from __future__ import annotations

import json
import random
import re
import threading
from pathlib import Path
from typing import get_args

import pytest

from tests.chaos import suite
from tests.chaos.__main__ import main
from tests.chaos.fault import Fault
from tests.chaos.faults import FAULTS
from tests.chaos.injections import InjectionPoint
from tests.chaos.sample_audit import SampleAudit, audit_samples, sample_hash
from tests.chaos.scenario import Scenario
from tests.chaos.suite import Baseline, FaultResult, render_table, run_suite, select_faults
from tests.conftest import tiny_recipe
from zero2all.cluster.launch.exit_reason import FailureKind
from zero2all.tokens import TokenStore
from zero2all.train.data_loader import read_batch
from zero2all.train.plan import Plan


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_survives_the_short_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One fault; ``.ci/long`` injects all. With two ranks: four would import torch for half a minute more."""
    monkeypatch.setattr(Scenario, "num_ranks", 2)
    monkeypatch.setattr("tests.chaos.fault.NUM_RANKS", 2)
    status = main(["--out", str(tmp_path), "--only", "kill a rank", "--seed", "1"])
    table = capsys.readouterr().out
    assert status == 0, table
    detected_and_recovered = r"\d+\.\d \| \d+\.\d"
    assert re.search(rf"\| kill a rank \| {detected_and_recovered} \| [1-4] \| 0 \| 0 \| survived \|", table), table
    [report] = (tmp_path / "kill-a-rank").glob("**/failures/*.json")
    cost = json.loads(report.read_text())["cost"]
    assert 0 < cost["steps_again"] <= 4, "flash checkpoints are taken every 4 steps"
    assert (tmp_path / "chaos.md").read_text() == table


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_fresh_node_resumes_from_the_replicas_of_its_peer(tmp_path: Path) -> None:
    """Bit for bit, and without any durable checkpoint."""
    [row] = run_suite(tmp_path, select_faults(["a node is replaced"]), seed=1)
    assert row.problems == [], render_table([row])
    if row.skipped is None:
        assert row.steps_again <= 2 * 4, "flash checkpoints are taken every 4 steps"


def test_every_injection_point_and_every_kind_of_failure_has_a_fault() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    points = {injection.where for fault in FAULTS for injection in fault.injections(random.Random(0))}
    assert points == {*get_args(InjectionPoint)}
    reported = {fault.expected_kind for fault in FAULTS}
    # Only these write no report: the agent's own doing, and what the ranks have already explained in their log.
    assert {*get_args(FailureKind)} - reported == {"ended by the agent", "stopped", "wrong usage"}


def test_an_unknown_fault_and_too_few_nodes_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--only", "earthquake"], "no fault is called earthquake"),
        (["--simulate", "3"], "at least 4"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


def test_a_problem_is_an_exit_status_of_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [FaultResult("a"), FaultResult("b", problems=["not every sample was seen exactly once"])]
    monkeypatch.setattr("tests.chaos.__main__.run_suite", lambda *options: rows)
    assert main(["--out", str(tmp_path)]) == 1
    rows.pop()
    assert main(["--out", str(tmp_path)]) == 0


@pytest.fixture
def plan(workspace: Path) -> Plan:
    recipe = tiny_recipe(workspace, "train.steps=3")
    return Plan(recipe, TokenStore(recipe.tokens_dir, "train"))


def write_seen(directory: Path, plan: Plan, start: str, steps: list[int], ranks: int, time: float) -> list[Path]:
    """What the ranks of the suite would have logged."""
    paths = []
    for rank in range(ranks):
        path = directory / f"seen-{start}-{rank}-1.jsonl"
        with open(path, "w", encoding="utf-8") as stream:
            for step in steps:
                batch = read_batch(plan, step, rank, ranks)
                rows = [sample_hash(row) for row, source in zip(batch.inputs, batch.sources, strict=True) if source]
                line = {"time": time + step, "start": start, "rank": rank, "step": step, "rows": rows}
                stream.write(json.dumps(line) + "\n")
        paths.append(path)
    return paths


def test_a_run_that_saw_every_sample_once_passes_for_any_rank_count(plan: Plan, tmp_path: Path) -> None:
    write_seen(tmp_path, plan, "one", [0, 1], 4, time=0.0)
    write_seen(tmp_path, plan, "two", [1, 2], 3, time=100.0)
    assert audit_samples(tmp_path, plan) == SampleAudit(samples_lost=0, samples_repeated=0, steps_repeated=1)


def test_lost_and_repeated_samples_are_counted(plan: Plan, tmp_path: Path) -> None:
    paths = write_seen(tmp_path, plan, "one", [0, 1, 2], 4, time=0.0)
    lost = paths[1].read_text().splitlines()
    paths[1].write_text("\n".join(lost[:-1]) + "\n")
    audit = audit_samples(tmp_path, plan)
    samples = len(json.loads(lost[-1])["rows"])
    assert (audit.samples_lost, audit.samples_repeated) == (samples, 0)
    twice = json.loads(paths[0].read_text().splitlines()[-1])
    twice["rows"] *= 2
    with open(paths[0], "a", encoding="utf-8") as stream:
        stream.write(json.dumps(twice) + "\n")
    assert audit_samples(tmp_path, plan).samples_repeated == samples


def test_a_torn_line_and_skipped_steps_are_tolerated(plan: Plan, tmp_path: Path) -> None:
    paths = write_seen(tmp_path, plan, "one", [0, 2], 2, time=0.0)
    with open(paths[0], "a", encoding="utf-8") as stream:
        stream.write('{"time": 1')
    assert audit_samples(tmp_path, plan).samples_lost > 0
    assert audit_samples(tmp_path, plan, skipped=frozenset({1})) == SampleAudit(
        samples_lost=0, samples_repeated=0, steps_repeated=0
    )


def test_the_table_shows_the_problems() -> None:
    text = render_table(
        [
            FaultResult("a", 0.1, 5.0, 2),
            FaultResult("b", problems=["not every sample was seen exactly once"]),
            FaultResult("c", skipped="no ip"),
        ]
    )
    assert "| a | 0.1 | 5.0 | 2 | 0 | 0 | survived |" in text
    assert "not every sample was seen exactly once" in text
    assert "skipped: no ip" in text


@pytest.fixture
def without_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faults here start no process."""
    monkeypatch.setattr(suite, "build_workspace", lambda root, seed: None)
    monkeypatch.setattr(suite, "run_baseline", lambda out, overrides: Baseline({}, 600.0))


@pytest.mark.usefixtures("without_jobs")
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


@pytest.mark.usefixtures("without_jobs")
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
