"""The suite of faults: its short form for real, and that it can tell a survivor from a victim."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import tiny_recipe
from zero2all.chaos.audit import Audit, audit, row_name
from zero2all.chaos.faults import FAULTS
from zero2all.chaos.suite import Row, run_suite, table
from zero2all.errors import UsageError
from zero2all.tokens import TokenStore
from zero2all.train.batches import read_batch
from zero2all.train.plan import Plan

SHORT = ["kill a rank", "a rank is stopped", "SIGTERM to the agent", "bit flipped in a checkpoint"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_short_form_is_survived(tmp_path: Path) -> None:
    rows = run_suite(tmp_path, only=SHORT, seed=1)
    assert [row.fault for row in rows] == SHORT
    for row in rows:
        assert row.problems == [], table(rows)
        assert row.skipped is None
        assert row.recovered is not None
        assert row.detected is not None
    killed = rows[0]
    assert killed.cost is not None, "what it cost is itemised"
    assert killed.cost["steps_again"] >= 0
    assert (tmp_path / "chaos.md").read_text() == table(rows) + "\n"


def test_there_are_faults_enough_and_each_has_its_name() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 30
    with pytest.raises(UsageError, match="no fault is called earthquake"):
        run_suite(Path("nowhere"), only=["earthquake"])


@pytest.fixture
def plan(world: Path) -> Plan:
    recipe = tiny_recipe(world, "train.steps=3")
    return Plan(recipe, TokenStore(recipe.tokens_dir, "train"))


def write_seen(directory: Path, plan: Plan, start: str, steps: list[int], ranks: int, time: float) -> list[Path]:
    """What ranks of the suite would have written down."""
    paths = []
    for rank in range(ranks):
        path = directory / f"seen-{start}-{rank}-1.jsonl"
        with open(path, "w", encoding="utf-8") as stream:
            for step in steps:
                batch = read_batch(plan, step, rank, ranks)
                rows = [row_name(row) for row, source in zip(batch.inputs, batch.sources, strict=True) if source]
                line = {"time": time + step, "start": start, "rank": rank, "step": step, "rows": rows}
                stream.write(json.dumps(line) + "\n")
        paths.append(path)
    return paths


def test_a_run_that_saw_everything_once_is_right_whatever_the_ranks(plan: Plan, tmp_path: Path) -> None:
    write_seen(tmp_path, plan, "one", [0, 1], 4, time=0.0)
    write_seen(tmp_path, plan, "two", [1, 2], 3, time=100.0)
    assert audit(tmp_path, plan) == Audit(lost=0, repeated=0, steps_again=1)


def test_what_is_lost_or_seen_twice_is_counted(plan: Plan, tmp_path: Path) -> None:
    paths = write_seen(tmp_path, plan, "one", [0, 1, 2], 4, time=0.0)
    lost = paths[1].read_text().splitlines()
    paths[1].write_text("\n".join(lost[:-1]) + "\n")
    found = audit(tmp_path, plan)
    samples = len(json.loads(lost[-1])["rows"])
    assert (found.lost, found.repeated) == (samples, 0)
    twice = json.loads(paths[0].read_text().splitlines()[-1])
    twice["rows"] *= 2
    with open(paths[0], "a", encoding="utf-8") as stream:
        stream.write(json.dumps(twice) + "\n")
    assert audit(tmp_path, plan).repeated == samples


def test_a_torn_line_and_steps_that_were_passed_over_do_no_harm(plan: Plan, tmp_path: Path) -> None:
    paths = write_seen(tmp_path, plan, "one", [0, 2], 2, time=0.0)
    with open(paths[0], "a", encoding="utf-8") as stream:
        stream.write('{"time": 1')
    assert audit(tmp_path, plan).lost > 0
    assert audit(tmp_path, plan, skipped=frozenset({1})) == Audit(lost=0, repeated=0, steps_again=0)


def test_the_table_says_what_is_wrong() -> None:
    text = table(
        [Row("a", 0.1, 5.0, 2), Row("b", problems=["not every sample was seen once"]), Row("c", skipped="no ip")]
    )
    assert "| a | 0.1 | 5.0 | 2 | 0 | 0 | survived |" in text
    assert "not every sample was seen once" in text
    assert "left out: no ip" in text
